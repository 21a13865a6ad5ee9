"""The routes that generate nothing."""

from __future__ import annotations

import json

import pytest

from kvern.version import __version__
from tests.services.scraping import scrape_until

from .http_client import until_healthy
from .setup import USER, Setup

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_models_are_listed_once_each(setup: Setup) -> None:
    answer = (await setup.client.get("/v1/models")).json()
    assert answer["object"] == "list"
    assert [model["id"] for model in answer["data"]] == ["tiny", "org/large"]
    model = answer["data"][0]
    assert (model["object"], model["owned_by"], model["max_model_len"]) == ("model", "kvern", 99)


@pytest.mark.parametrize("name", ["tiny", "org/large"])
async def test_model_is_found_by_its_name(setup: Setup, name: str) -> None:
    assert (await setup.client.get(f"/v1/models/{name}")).json()["id"] == name


async def test_model_that_is_not_served_is_not_found(setup: Setup) -> None:
    response = await setup.client.get("/v1/models/huge")
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")


async def test_tokenize_of_text_and_detokenize_are_in_vllm_form(setup: Setup) -> None:
    body = {"prompt": "ab", "model": "tiny", "messages": None}
    answer = (await setup.client.post("/tokenize", json=body)).json()
    assert answer == {"count": 2, "max_model_len": 99, "tokens": [97, 98], "token_strs": None}
    assert not setup.router.tokenized[0].HasField("add_special_tokens")
    answer = (await setup.client.post("/detokenize", json={"tokens": [97, 98], "model": "tiny"})).json()
    assert answer == {"prompt": "ab"}


async def test_tokenize_of_a_chat_renders_what_generating_would(setup: Setup) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    fields = {"messages": [USER], "tools": [tool], "add_generation_prompt": False, "chat_template_kwargs": {"a": 1}}
    answer = (await setup.client.post("/tokenize", json=fields)).json()
    assert answer["count"] == 4
    [request] = setup.router.tokenized
    assert request.chat == (await setup.asked(**fields)).chat
    assert json.loads(request.chat.tools_json) == [tool]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, 2**32]}, "tokens[1]"),
    ],
)
async def test_bodies_that_cannot_be_are_refused_by_name(
    setup: Setup, path: str, body: dict[str, object], param: str
) -> None:
    response = await setup.client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_version_is_the_package_s(setup: Setup) -> None:
    assert (await setup.client.get("/version")).json() == {"version": __version__}


async def test_health_and_readiness_follow_router(setup: Setup) -> None:
    await until_healthy(setup.client)
    await scrape_until(setup.status, lambda now: now("kvern_ready") == 1)
    await setup.router.set_serving(False)
    assert (await setup.client.get("/health")).status_code == 503
    await scrape_until(setup.status, lambda now: now("kvern_ready") == 0)
    await setup.router.set_serving(True)


async def test_openapi_document_describes_every_route_and_all_it_refers_to(setup: Setup) -> None:
    document = (await setup.client.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    assert set(document["paths"]) == {
        "/v1/models",
        "/v1/models/{model}",
        "/v1/completions",
        "/v1/chat/completions",
        "/tokenize",
        "/detokenize",
        "/health",
        "/version",
        "/metrics",
        "/openapi.json",
    }
    text = json.dumps(document)
    names = {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names == set(document["components"]["schemas"])
    for path in document["paths"].values():
        for operation in path.values():
            assert {"200", "400", "500"} <= operation["responses"].keys()
