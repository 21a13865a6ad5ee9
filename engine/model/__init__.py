"""Models: reading their files, and running them."""

from kvern.engine.model.config import ModelShape
from kvern.engine.model.loader import LoadedModel, load_model

__all__ = ["LoadedModel", "ModelShape", "load_model"]
