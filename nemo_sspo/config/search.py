"""Where configuration files lie, and on which line of one a key stands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from nemo_sspo.errors import UserError

_PACKAGE = Path(__file__).resolve().parents[1]


def config_dirs(config_dir: str | Path | None = None) -> list[Path]:
    """Folders searched for a config, first match wins.

    The order: ``config_dir``, ``./conf``, the checkout's ``conf``, the copy that the wheel carries.

    Raises:
        UserError: ``config_dir`` is given and is not a folder.
    """
    folders = [Path("conf"), _PACKAGE / "conf_installed"]
    if (_PACKAGE.parent / "pyproject.toml").is_file():
        folders.insert(1, _PACKAGE.parent / "conf")
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise UserError(f"--config-dir: {config_dir} is not a folder; give the folder that holds the config files")
        folders.insert(0, Path(config_dir))
    existing = [folder.resolve() for folder in folders if folder.is_dir()]
    return list(dict.fromkeys(existing))


def find_config(name: str, config_dir: str | Path | None = None) -> tuple[Path, str]:
    """The folder that holds config ``name`` (given with or without ``.yaml``) and its name without ``.yaml``.

    Raises:
        UserError: there is none; the message lists those that exist.
    """
    folders = config_dirs(config_dir)
    stem = name.removesuffix(".yaml")
    if stem.startswith("/") or ".." in Path(stem).parts:
        raise UserError(f"--config-name: got the path {name}; give the file's name, and its folder as --config-dir")
    for folder in folders:
        if stem and (folder / f"{stem}.yaml").is_file():
            return folder, stem
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    where = ", ".join(str(folder) for folder in folders) or "no folder: there is no ./conf, give --config-dir"
    raise UserError(
        f"--config-name: no config named {name!r}; those that exist: {', '.join(known) or 'none'} (searched {where})"
    )


def locate(path: Path, key: str) -> str:
    """``file:line`` where the dotted key stands in a YAML file; empty where the file does not hold it."""
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return ""
    line = 0
    for name in key.split("."):
        found = next(_entries(node, name), None)
        if found is None:
            return ""
        line, node = found
    return f"{path}:{line}"


def _entries(node: yaml.Node | None, name: str) -> Iterator[tuple[int, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        for entry, value in node.value:
            if entry.value == name:
                yield entry.start_mark.line + 1, value
