"""Kubernetes' own schemas, loaded once, and those of custom resources."""

from __future__ import annotations

import functools
import json
from typing import Any

import jsonschema
import referencing
from kubernetes_validate.utils import all_versions, schema_contents

from tests.helm.chart import HERE, Document

CUSTOM = {path.stem for path in (HERE / "schemas").glob("*.json")}


def is_custom(document: Document) -> bool:
    return document["kind"].lower() in CUSTOM


def trouble(document: Document, version: str) -> list[str]:
    """Return what a Kubernetes of this version, as `1.31`, has against a document."""
    return list(_trouble(json.dumps(document, sort_keys=True), version))


@functools.cache
def _trouble(text: str, version: str) -> tuple[str, ...]:
    # Most documents are the same in many renderings.
    document = json.loads(text)
    found = _validator(document["kind"].lower(), document["apiVersion"], version).iter_errors(document)
    return tuple(f"{document['kind']}: {error.json_path}: {error.message}" for error in found)


@functools.cache
def _validator(kind: str, api_version: str, version: str) -> Any:
    if kind in CUSTOM:
        return jsonschema.Draft202012Validator(json.loads((HERE / "schemas" / f"{kind}.json").read_text()))
    folder, definitions = _definitions(version)
    group, _, name = api_version.rpartition("/")
    suffix = f"{group.split('.')[0]}-{name}" if group else name
    schema = schema_contents(f"{folder}/{kind}-{suffix}.json", version)
    resource = referencing.Resource.from_contents(schema)
    return jsonschema.Draft202012Validator(schema, registry=definitions.with_resource(resource.id() or "", resource))


@functools.cache
def _definitions(version: str) -> tuple[str, Any]:
    [full] = {each for each in all_versions() if each.startswith(f"{version}.")}
    folder = f"kubernetes-json-schema/v{full}-local-strict"
    definitions = referencing.Resource.from_contents(schema_contents(f"{folder}/_definitions.json", version))
    return folder, definitions @ referencing.Registry()
