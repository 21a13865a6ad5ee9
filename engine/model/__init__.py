"""Models: reading their files, and running them."""

from kvern.engine.model.config import ModelConfig
from kvern.engine.model.loader import LoadedModel, load_model

__all__ = ["LoadedModel", "ModelConfig", "load_model"]
