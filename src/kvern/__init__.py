"""Kvern serves large language models as asyncio gRPC services.

Submodules: `cli` (the command), `client`, `v1` (generated protobuf and gRPC code), `services`, `engine`, `kernels`.
"""

from kvern.version import __version__

__all__ = ["__version__"]
