"""What an output must match: the ways in which clients say it, and the Constraint each stands for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from kvern.services.gateway.errors import ApiError
from kvern.services.gateway.request_body import Body
from kvern.v1.inference_pb2 import Choices, Constraint


class JsonSchema(Body):
    """What `response_format` of type json_schema holds. The schema is followed strictly, asked for or not."""

    neutral: ClassVar = {"strict": (True, False)}

    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None


class ResponseFormat(Body):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def to_proto(self) -> Constraint | None:
        """Raises ApiError where the schema is missing."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return Constraint(json_object=True)
        if self.json_schema is None:
            field = "response_format.json_schema"
            raise ApiError(400, f"{field}: Field required", field, "missing_required_parameter")
        return Constraint(json_schema=json.dumps(self.json_schema.schema_))


class StructuredOutputs(Body):
    """What the answer must be, as vLLM's clients say it: one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    """A JSON schema."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """EBNF."""
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None

    def to_protos(self) -> dict[str, Constraint | None]:
        """Return what each field stands for."""
        return {
            "json": None if self.json_ is None else Constraint(json_schema=_text(self.json_)),
            "regex": None if self.regex is None else Constraint(regex=self.regex),
            "choice": None if self.choice is None else Constraint(choices=Choices(values=self.choice)),
            "grammar": None if self.grammar is None else Constraint(grammar=self.grammar),
            "json_object": Constraint(json_object=True) if self.json_object else None,
            "structural_tag": None
            if self.structural_tag is None
            else Constraint(structural_tag=_text(self.structural_tag)),
        }


class Given:
    """Collects constraints by the fields that name them."""

    def __init__(self) -> None:
        self.by_field: dict[str, Constraint] = {}

    def add(self, field: str, constraint: Constraint | None) -> None:
        if constraint is not None:
            self.by_field[field] = constraint

    def add_all(self, prefix: str, structured: StructuredOutputs) -> None:
        for name, constraint in structured.to_protos().items():
            self.add(f"{prefix}{name}", constraint)


def the_one_of(given: Mapping[str, Constraint]) -> Constraint | None:
    """Return the constraint if there is one. Raises ApiError where there are several."""
    fields = list(given)
    if len(fields) > 1:
        raise ApiError(400, f"{fields[1]}: cannot hold beside {fields[0]}", fields[1], "invalid_value")
    return given[fields[0]] if fields else None


def leaves_text_free(constraint: Constraint) -> bool:
    """Whether text outside of what is held to a form may be anything. Raises ValueError for a tag that is not JSON."""
    return constraint.HasField("structural_tag") and "format" not in json.loads(constraint.structural_tag)


def _text(value: dict[str, Any] | str) -> str:
    return value if isinstance(value, str) else json.dumps(value)
