"""Reads the quantization settings of a model's ``config.json``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..formats import Format
from .checkpoint import read_object

_KEYS = ("quantization", "quantization_config")
# Checkpoints of other tools whose packed weights mlx-lm reads as they are.
_METHODS = {
    "mxfp4": Format(32, 4, "mxfp4"),
    "mxfp8": Format(32, 8, "mxfp8"),
}


@dataclass(frozen=True)
class QuantizationConfig:
    """The quantization of a model, layer by layer.

    Attributes:
        default: the format of layers that have no entry of their own, or None.
        layers: the entries of single layers by module path; ``False`` leaves a layer as it is.
            As in mlx-lm, what an entry lacks is MLX's default, whatever the other layers have.
        source: where this was read, for messages.

    Example:
        >>> config = QuantizationConfig.parse(
        ...     {"quantization": {"group_size": 64, "bits": 4, "lm_head": {"bits": 8}}}
        ... )
        >>> config.default, config.layers["lm_head"]
        (Format(group_size=64, bits=4, mode='affine'), Format(group_size=64, bits=8, mode='affine'))
    """

    default: Format | None = None
    layers: Mapping[str, Format | bool] = field(default_factory=dict)
    source: str = "config"

    @classmethod
    def read(cls, config: object) -> QuantizationConfig:
        """From a dictionary, a ``config.json``, or a directory that holds one.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is no JSON object, or an entry has a wrong type or value.
        """
        if isinstance(config, QuantizationConfig):
            return config
        if isinstance(config, Mapping):
            return cls.parse(config)
        if not isinstance(config, (str, os.PathLike)):
            raise ValueError(f"config must be a dictionary or a path, not {config!r}")
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        return cls.parse(read_object(path, "configuration"), source=str(path))

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: str = "config") -> QuantizationConfig:
        """From the contents of a ``config.json``.

        ``quantization`` comes before ``quantization_config``, the top level before
        ``text_config``, as in mlx-lm.

        Raises:
            ValueError: an entry has a wrong type or value; its key and value are named.
        """
        for prefix, level in (("", config), ("text_config.", config.get("text_config") or {})):
            if not isinstance(level, Mapping):
                raise ValueError(f"{source}: text_config must be an object, not {level!r}")
            for key in _KEYS:
                if (entry := level.get(key)) is None:
                    continue
                where = f"{source}: {prefix}{key}"
                if not isinstance(entry, Mapping):
                    raise ValueError(f"{where} must be an object, not {entry!r}")
                return cls._parse_entry(entry, where)
        return cls(source=source)

    @classmethod
    def _parse_entry(cls, entry: Mapping[str, Any], where: str) -> QuantizationConfig:
        if "quant_method" in entry and "group_size" not in entry:
            return cls(_METHODS.get(str(entry["quant_method"])), {}, where)
        if "quant_method" in entry or "quant_algo" in entry:
            return cls(None, {}, where)  # another tool's format: the loaded arrays tell
        for key in ("group_size", "bits"):
            if key not in entry:
                raise ValueError(f"{where}.{key} is missing")
        default = _format(entry, where)
        layers: dict[str, Format | bool] = {}
        for key, value in entry.items():
            if key in ("group_size", "bits", "mode"):
                continue
            if not isinstance(key, str) or not key.isprintable():
                raise ValueError(f"{where}: the key {key!r} must be a string that can be printed")
            if isinstance(value, Mapping):
                layers[key] = _format(value, f"{where}.{key}")
            elif isinstance(value, bool):
                layers[key] = value
            elif "." in key or value is None:
                raise ValueError(f"{where}.{key} must be an object or a boolean, not {value!r}")
        return cls(default, layers, where)

    def entry(self, path: str) -> tuple[str, Format | bool | None]:
        """The key that decides about the module at ``path``, and its value.

        A key also matches if the model adds or drops a prefix of the checkpoint's names
        (``model.layers.0`` and ``language_model.model.layers.0``).
        """
        names = path.split(".")
        candidates = (".".join(names[i:]) for i in range(len(names)))
        key = next((key for key in candidates if key in self.layers), self._longer.get(path))
        if key is None:
            return "", self.default
        said = self.layers[key]
        return key, self.default if said is True else said

    @cached_property
    def _longer(self) -> dict[str, str]:
        """The keys by every name that is left when prefixes are dropped."""
        keys: dict[str, str] = {}
        for key in self.layers:
            names = key.split(".")
            for i in range(1, len(names)):
                keys.setdefault(".".join(names[i:]), key)
        return keys

    def check(self, path: str, key: str, said: Format | bool | None, live: Format) -> None:
        """Raise a ValueError if an entry contradicts the format of the arrays at ``path``."""
        if said is False or (isinstance(said, Format) and said != live):
            says = "it is not quantized" if said is False else str(said)
            raise ValueError(
                f"{path}: {self.describe(key)} says {says}, but the arrays hold {live}; "
                "without a config the arrays are trusted"
            )

    def describe(self, key: str) -> str:
        """A key as it stands in the file."""
        return f"{self.source}.{key}" if key else self.source


def _format(entry: Mapping[str, Any], where: str) -> Format:
    try:
        return Format.from_entry(entry)
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from error
