"""How much tenants may have: requests at once, and tokens a minute.

    async with limits.admit(caller, Kind.GENERATE) as usage:
        usage.charge(num_prompt_tokens)
        ...
        usage.charge(num_output_tokens)

All routers count together in Redis. Where it does not answer in a few milliseconds, each counts for itself.
"""

from kvern.services.router.limits.limiter import TenantLimits, Usage
from kvern.services.router.limits.line import Kind

__all__ = ["Kind", "TenantLimits", "Usage"]
