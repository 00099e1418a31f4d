# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What this machine has, or another one is assumed to have, without importing what may be broken.

torch and the cuDNN frontend are imported in a child process: one that crashes, or prints, or takes
the wrong libraries along, then leaves this process as it is.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from te_grouped_mlp.cli import frontend_releases
from te_grouped_mlp.cli.output import BadArgument
from te_grouped_mlp.integration import installed_te
from te_grouped_mlp.integration.standalone import loader
from te_grouped_mlp.op import extension
from te_grouped_mlp.op.environment import Environment, read_switches
from te_grouped_mlp.op.packages import Absent, package_versions

ASSUMABLE = {
    "sm": "sm",
    "frontend": "cudnn_frontend",
    "te": "transformer_engine",
    "torch": "torch",
    "cutlass_dsl": "cutlass_dsl",
    "quack": "quack",
    "triton": "triton",
}
"""Keys of `--assume`."""

_NONE = "none"
# Loosely, because this must work where nothing is installed.
_VERSION = re.compile(r"\d+(\.\d+)*[a-z0-9.+-]*")
_CHILD_SECONDS = 60
_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from te_grouped_mlp.op import environment, packages
from te_grouped_mlp.integration.standalone import loader
found = environment.current()
sm = {"cause": found.sm.cause} if not found.sm else list(found.sm)
wrappers = found.wrappers
if isinstance(wrappers, packages.Absent):
    wrappers = {"cause": wrappers.cause}
else:
    wrappers = {name: sorted(arguments) for name, arguments in wrappers.items()}
print(json.dumps([sm, wrappers, loader.should_start()[0]]))
"""


def parse_assumptions(text: str) -> dict[str, str]:
    """Parse `sm=100,frontend=1.32.0,...`.

    Returns:
        Key of ASSUMABLE -> value; "none" stands for an absence.

    Raises:
        BadArgument: A key or a value is not allowed.
    """
    found: dict[str, str] = {}
    for item in text.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if key not in ASSUMABLE or not equals or not value:
            raise BadArgument(
                f"--assume: {item!r} is not allowed; allowed: KEY=VALUE with KEY one of "
                f"{', '.join(ASSUMABLE)}, and VALUE a version, or none"
            )
        if key in found:
            raise BadArgument(f"--assume: {key} is given twice; allowed: each key once")
        found[key] = value
    for key, value in found.items():
        _check_version(key, value)
    _sm(found.get("sm", _NONE))
    release = found.get("frontend", _NONE)
    if release != _NONE and release not in frontend_releases.RELEASES:
        raise BadArgument(
            f"--assume: frontend={release!r} is not known; allowed: none, "
            f"{', '.join(frontend_releases.RELEASES)}"
        )
    return found


def _check_version(key: str, value: str) -> None:
    """Refuse what is no version, and a TE about whose own op nothing is known here."""
    if key == "sm" or value == _NONE:
        return
    if key == "te" and not installed_te.is_supported(value):
        raise BadArgument(
            f"--assume: te={value!r} is not known; allowed: none, {installed_te.SUPPORTED}"
        )
    if not _VERSION.fullmatch(value):
        raise BadArgument(f"--assume: {key}={value!r} is not allowed; allowed: a version, or none")


def _sm(text: str) -> tuple[int, int] | Absent:
    if text == _NONE:
        return Absent("assumed to have no GPU")
    digits = text.replace(".", "", 1)
    if not digits.isascii() or not digits.isdigit() or not 2 <= len(digits) <= 3:
        raise BadArgument(f"--assume: sm={text!r} is not allowed; allowed: none, 90, 100, 103, ...")
    return int(digits[:-1]), int(digits[-1])


def examine(assumed: Mapping[str, str]) -> Environment:
    """Return the machine's facts, those in `assumed` taken for given.

    Raises:
        ValueError: An environment variable of ours has a value that is not allowed.
    """
    versions = dict(package_versions())
    for key, value in assumed.items():
        if key != "sm":
            name = ASSUMABLE[key]
            versions[name] = Absent(f"{name} is assumed absent") if value == _NONE else value
    # The switch is on in the table: what would run is the question.
    switches = replace(read_switches(), fused=True)
    sm, wrappers, standalone = _probe(versions, assumed)
    if "sm" in assumed:
        sm = _sm(assumed["sm"])
        standalone = loader.should_start(bool(sm))[0]
    if "frontend" in assumed:
        release = versions["cudnn_frontend"]
        wrappers = release if isinstance(release, Absent) else frontend_releases.wrappers(release)
    return Environment(sm, versions, wrappers, switches, standalone, extension=extension.status())


def _probe(
    versions: Mapping[str, str | Absent], assumed: Mapping[str, str]
) -> tuple[Any, Any, bool]:
    """Return compute capability, wrappers, and whether TE would run standalone."""
    frontend = versions["cudnn_frontend"]
    has_torch = importlib.util.find_spec("torch") is not None
    asks_torch = has_torch and "sm" not in assumed
    asks_frontend = bool(frontend) and "frontend" not in assumed
    if not asks_torch and not asks_frontend:
        cause = "torch was not asked" if has_torch else "torch is not installed"
        return Absent(cause), frontend, loader.extension_location() is None
    return _ask_child()


def _ask_child() -> tuple[Any, Any, bool]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, json.dumps(sys.path)],
            capture_output=True,
            text=True,
            timeout=_CHILD_SECONDS,
            check=False,
        )
        sm, wrappers, standalone = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        cause = Absent(f"importing torch and the frontend took over {_CHILD_SECONDS} s")
        return cause, cause, False
    except (IndexError, ValueError):
        lines = done.stderr.strip().splitlines()
        how = lines[-1] if lines else f"the process ended with code {done.returncode}"
        cause = Absent(f"a look at torch and the frontend failed: {how}")
        return cause, cause, False
    if isinstance(sm, dict):
        sm = Absent(sm["cause"])
    if "cause" in wrappers:
        wrappers = Absent(wrappers["cause"])
    else:
        wrappers = {name: frozenset(arguments) for name, arguments in wrappers.items()}
    return sm if isinstance(sm, Absent) else tuple(sm), wrappers, standalone
