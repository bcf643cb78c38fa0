"""From a config's name and overrides to dataclasses: the one place where a ``DictConfig`` becomes a `RunConfig`.

Hydra composes (defaults lists, groups, overrides in its syntax); the schema then decides which keys and types
exist. Whatever goes wrong is one `UserError` of one line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_sspo.config.hf import read_hf_config
from nemo_sspo.config.keys import is_section, schema_keys, show, suggest, type_name
from nemo_sspo.config.schema import RunConfig
from nemo_sspo.config.search import config_dirs, find_config, locate
from nemo_sspo.errors import UserError

_ROOT, _DEFAULTS = "_nemo_sspo_root", "_nemo_sspo_defaults"  # names in Hydra's ConfigStore


def load_config(
    config_name: str,
    overrides: Sequence[str] = (),
    config_dir: str | Path | None = None,
    read_pretrained: bool | None = True,
) -> RunConfig:
    """Compose a config by name, apply overrides, and check every key and type against the schema.

    Keys of the model's shape that are at their defaults come from ``pretrained_checkpoint.restore_from_path``.

    Args:
        config_name: a file's name without ``.yaml``, searched for as `config_dirs` says.
        overrides: Hydra's syntax; every key of the schema can be set without ``+``, and ``~key`` restores its default.
        config_dir: a folder searched before the others.
        read_pretrained: False for a config that is already resolved; None: if the folder is there.

    Raises:
        UserError: unknown config, bad YAML, bad override, unknown key, wrong type, missing mandatory value; a value
            that is not the pretrained model's.
    """
    folder, name = find_config(config_name, config_dir)
    folders = config_dirs(config_dir)
    parsed = [_parse_override(text) for text in overrides]
    for override in parsed:
        _check_override_keys(override, folders)
    source = _Source(folder / f"{name}.yaml", parsed)
    folders.remove(folder)
    composed = _compose(folder, name, folders, [_as_hydra(override) for override in parsed])
    values = dict(_leaves(composed, "", source))
    if read_pretrained is not False:
        values |= _pretrained_shape(values, source, must_exist=bool(read_pretrained))
    return _to_run_config(values, source)


def load_run_config(run_dir: str | Path) -> RunConfig:
    """The resolved config that a run wrote into its folder.

    Raises:
        UserError: the folder holds no ``config.yaml``, or one that this version cannot read.
    """
    if not (Path(run_dir) / "config.yaml").is_file():
        raise UserError(f"{run_dir}: not a run's folder (it has no config.yaml); give the folder of a finished run")
    return load_config("config", config_dir=run_dir, read_pretrained=False)


class _Source:
    """Says where a key's value came from, as the end of a message."""

    def __init__(self, path: Path, overrides: Sequence[Override]):
        self.path = path
        self.overrides = overrides

    def of(self, key: str) -> str:
        for override in self.overrides:
            name = override.key_or_group
            if key == name or key.startswith(name + "."):
                return f" (from the override {override.input_line})"
        place = locate(self.path, key)
        return f" (in {place or f'{self.path} or a file that it includes'})"


def _parse_override(text: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise UserError(
            f"override {text!r}: {_one_line(error)}; write key=value, for example model.seed=2 "
            "(quote values that hold spaces, commas or brackets)"
        ) from error
    if override.is_sweep_override():
        raise UserError(
            f"override {text!r}: a sweep over several values is not one run; give one value, or a list as [a,b]"
        )
    return override


def _check_override_keys(override: Override, folders: Sequence[Path]) -> None:
    def walk(key: str, value: Any) -> Iterator[str]:
        yield key
        if isinstance(value, dict):
            for name, inner in value.items():
                yield from walk(f"{key}.{name}", inner)

    group = override.key_or_group
    if group and any((folder / group).is_dir() for folder in folders):
        return  # a group of configs, and its value names one of them
    for key in walk(group, override.value()):
        if key not in schema_keys():
            raise UserError(f"override {override.input_line!r}: there is no key {key}; {suggest(key)}")


def _as_hydra(override: Override) -> str:
    """The override as Hydra takes it: every schema key is there already, so that ``+key`` means ``++key``."""
    text = cast(str, override.input_line)
    return f"+{text}" if override.is_add() and override.key_or_group in schema_keys() else text


def _compose(folder: Path, name: str, others: Sequence[Path], overrides: list[str]) -> dict[str, Any]:
    store = ConfigStore.instance()
    store.store(_DEFAULTS, node=OmegaConf.to_container(OmegaConf.structured(RunConfig)))
    root = {
        "defaults": [_DEFAULTS, f"{name}@_global_", "_self_"],
        "hydra": {"searchpath": [f"file://{other}" for other in others]},
    }
    store.store(_ROOT, node=root)
    path = folder / f"{name}.yaml"
    try:
        with initialize_config_dir(str(folder), version_base=None):
            config = compose(_ROOT, overrides=overrides)
        return cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True))
    except yaml.YAMLError as error:
        raise UserError(_yaml_message(path, error)) from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(f"{path}: {_one_line(error)}") from error


def _yaml_message(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f"{mark.name}:{mark.line + 1}" if mark else str(path)
    return f"{place}: not valid YAML: {getattr(error, 'problem', None) or _one_line(error)}; mend that line"


def _leaves(node: dict[str, Any], prefix: str, source: _Source) -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything composed, refusing what the schema does not have."""
    unknown = [name for name in node if f"{prefix}{name}" not in schema_keys()]
    if unknown:
        key = f"{prefix}{unknown[0]}"
        more = f"; unknown beside it: {', '.join(map(str, unknown[1:]))}" if unknown[1:] else ""
        raise UserError(f"there is no key {key}{source.of(key)}; {suggest(key)}{more}")
    for name, value in node.items():
        key = f"{prefix}{name}"
        if not is_section(key):
            yield key, value
        elif isinstance(value, dict):
            yield from _leaves(value, f"{key}.", source)
        else:
            raise UserError(
                f"{key}: got {show(value)}, expected a section with keys of its own{source.of(key)}; "
                "leave it out to keep its defaults"
            )


def _pretrained_shape(values: dict[str, Any], source: _Source, must_exist: bool) -> dict[str, Any]:
    """What the pretrained model's folder decides. A value that is neither its nor the default contradicts it."""
    folder = values["pretrained_checkpoint.restore_from_path"]
    if folder is None:
        return {}
    if not isinstance(folder, str):
        return {}  # its type is refused later
    if not must_exist and not Path(folder).is_dir():
        return {}
    defaults = OmegaConf.structured(RunConfig)
    decided = {f"model.{key}": value for key, value in read_hf_config(folder).items()}
    for key, value in decided.items():
        default = "???" if OmegaConf.is_missing(defaults.model, key.split(".")[1]) else OmegaConf.select(defaults, key)
        if values[key] not in (value, default):
            raise UserError(
                f"{key}: got {show(values[key])}{source.of(key)}, but the model in {folder} has {show(value)}; "
                "leave it out, or set pretrained_checkpoint.restore_from_path=null"
            )
    return decided


def _to_run_config(values: dict[str, Any], source: _Source) -> RunConfig:
    config: DictConfig = OmegaConf.structured(RunConfig)
    for key, value in values.items():
        try:
            OmegaConf.update(config, key, value)
        except OmegaConfBaseException as error:
            expected = type_name(schema_keys()[key])
            hint = f"; for example {key}=[{value}]" if expected.startswith("list") and isinstance(value, str) else ""
            raise UserError(f"{key}: got {show(value)}, expected {expected}{source.of(key)}{hint}") from error
    missing = sorted(OmegaConf.missing_keys(config), key=list(schema_keys()).index)
    if missing:
        example = f"{missing[0]}=<{type_name(schema_keys()[missing[0]])}>"
        raise UserError(
            f"no value for {', '.join(missing)}; add it to {source.path} or to the command line, as in {example}"
        )
    return cast(RunConfig, OmegaConf.to_object(config))


def _one_line(error: BaseException) -> str:
    """An exception of Hydra's or OmegaConf's, with its cause, without line breaks and search paths."""
    texts = [str(part).partition("Config search path:")[0] for part in (error, error.__cause__)]
    parts = [" ".join(text.split()) for text in texts]
    return "; ".join(part for part in parts if part not in ("", "None"))
