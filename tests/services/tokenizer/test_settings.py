from __future__ import annotations

from pathlib import Path

import pytest

from kvern.services.runtime.settings import SettingsError
from kvern.services.tokenizer.__main__ import find_models
from kvern.services.tokenizer.settings import TokenizerSettings


def load(*flags: str, **environ: str) -> TokenizerSettings:
    return TokenizerSettings.load(["--listen", "unix:/x.sock", *flags], prog="test", environ=environ)


def test_further_models_come_repeated_joined_in_a_variable_or_as_a_mapping_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("more-models: {a: smollm2, org/b: /models/b=1}\n")
    expected = {"a": "smollm2", "org/b": "/models/b=1"}
    assert load("--more-models", "a=smollm2", "--more-models", "org/b=/models/b=1").more_models == expected
    assert load("--more-models=a=smollm2,org/b=/models/b=1").more_models == expected
    assert load(KVERN_MORE_MODELS="a=smollm2, org/b=/models/b=1").more_models == expected
    assert load("--config", str(file)).more_models == expected
    assert load().more_models == {}


@pytest.mark.parametrize("flag", ["a", "a=", "=smollm2"])
def test_further_model_without_a_name_or_a_model_is_refused(flag: str) -> None:
    with pytest.raises(SettingsError, match="more_models"):
        load("--more-models", flag)


def test_models_are_found_by_what_clients_call_them() -> None:
    models = find_models(load("--served-model-name", "small", "--more-models", "smollm2=smollm2"))
    assert list(models) == ["small", "smollm2"]
    assert models["small"] == models["smollm2"]
    with pytest.raises(SettingsError, match="more_models: 'smollm2'"):
        find_models(load("--more-models", "smollm2=smollm2"))


def test_text_cache_takes_a_size_with_a_suffix() -> None:
    assert load("--text-cache-memory", "64MiB").text_cache_memory == 64 * 1024 * 1024
    assert load("--text-cache-memory", "0").text_cache_memory == 0
    with pytest.raises(SettingsError, match="text_cache_memory"):
        load("--text-cache-memory", "-1")
