"""Nothing that comes with a model or a call is run as Python, by our own code or by libraries that load it for us."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvern.engine.config import EngineConfig
from kvern.engine.errors import EngineError
from kvern.engine.model.loader import load_model
from kvern.services.runtime.text import load_tokenizer
from tests.services import small_tokenizers

ROOT = Path(__file__).resolve().parent.parent
FILES = [file for folder in ("engine", "kernels", "services", "src/kvern") for file in (ROOT / folder).rglob("*.py")]

_UNPICKLE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
_RUN = {"eval", "exec"}


def _calls() -> Iterator[tuple[Path, ast.Call]]:
    for file in FILES:
        yield from ((file, node) for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func)


def test_nothing_unpickles() -> None:
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                imported = {alias.name.partition(".")[0] for alias in node.names}
                module = node.module if isinstance(node, ast.ImportFrom) else None
                assert _UNPICKLE.isdisjoint(imported | {module or ""}), file
    for file, call in _calls():
        assert _name(call) not in {"torch.load", "np.load", "numpy.load", "yaml.unsafe_load"} | _RUN, file


def test_every_load_of_transformers_refuses_code_of_the_models() -> None:
    loads = [(file, call) for file, call in _calls() if _name(call).endswith(".from_pretrained")]
    assert len(loads) >= 3
    for file, call in loads:
        [trust] = [word.value for word in call.keywords if word.arg == "trust_remote_code"]
        assert isinstance(trust, ast.Constant), file
        assert trust.value is False, file


def test_code_beside_a_model_is_not_run(tmp_path: Path) -> None:
    source = small_tokenizers.save(small_tokenizers.byte_level(), tmp_path)
    marker = tmp_path / "was-run"
    for name in ("configuration_evil", "modeling_evil", "tokenization_evil"):
        (tmp_path / f"{name}.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    mapped = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    config = {"model_type": "evil", "architectures": ["Evil"], "auto_map": mapped, "vocab_size": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", None]}, "tokenizer_class": "Evil"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    load_tokenizer(source)
    with pytest.raises(EngineError):
        load_model(EngineConfig(model_path=tmp_path))
    assert not marker.exists()


def test_weights_that_would_be_unpickled_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(EngineError):
        load_model(EngineConfig(model_path=tmp_path))
