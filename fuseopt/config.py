"""Options of a compilation: one frozen Config, the only reader of the environment.

`resolve(mode, options)` reads the arguments that `torch.compile` passes on. An unknown
name raises ConfigError with the valid names.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from .errors import ConfigError

#: Versions of torch that pass all tests: the first, and the first one after them. The
#: test matrix, the requirement in the package and the checks of `doctor` follow from
#: it.
CHECKED = ((2, 11), (2, 16))
#: The modes of torch.compile, and the `cudagraphs` of each; options override it. No
#: mode tunes kernels, since tuning would run them on the state of a step.
MODES: dict[str, bool | None] = {
    "default": None,
    "reduce-overhead": True,
    "max-autotune": True,
    "max-autotune-no-cudagraphs": False,
}


@dataclass(frozen=True)
class Config:
    """Options of one compilation.

    target: "auto" (C++ on a CPU, Triton on an accelerator), "cpp" or "triton".
    numerics: "eager" gives eager's bits; "fast" lets the compiler contract and
        reassociate.
    fallback: runs a graph that is no optimizer step: "inductor", "eager" or "error".
    verify: run eager on clones beside each step, and raise at the first bit that
        differs.
    dump_dir: a folder for the graph after each pass, refusals, source and layout.
    debug: 0 is silent. 1 prints the Report of each compilation, 2 adds refusals to
        fuse, 3 the graph after each pass, 4 the generated source.
    cache_dir: the folder of built kernels.
    check: check the invariants of the graph after each pass, and prove that the
        schedule is right. A dump also turns this on.
    cudagraphs: capture the launches of a step on an accelerator and replay them. "auto"
        does so where a replay replaces more than one launch. "require" raises
        CudaGraphError where CUDA cannot capture the launches.
    raw_fields: read the fields of tensors directly from memory; fuseopt finds and tests
        their offsets. False calls the C functions that torch exports, which takes
        longer.
    eager_if_faster: time the first steady calls on a CPU beside eager, which gives the
        same bits. If eager is faster, fuseopt reports it and runs eager.
    batch_bytes: the most bytes of one operand of products of matrices that share a
        call; more matrices are several calls. With 0 each product has a call.
    compile_debug: write the files of `dump_dir` into the debug folder of torch's own
        compilers.
    """

    target: str = "auto"
    numerics: str = "eager"
    fallback: str = "inductor"
    verify: bool = False
    dump_dir: str | None = None
    debug: int = 0
    cache_dir: str | None = None
    check: bool = False
    cudagraphs: bool | str = "auto"
    raw_fields: bool = True
    eager_if_faster: bool = True
    batch_bytes: int = 64 << 20
    compile_debug: bool = False

    @property
    def writes(self) -> bool:
        """Does a compilation write files?"""
        return bool(self.dump_dir or self.debug or self.compile_debug)


CHOICES: dict[str, tuple[object, ...]] = {
    "target": ("auto", "cpp", "triton"),
    "numerics": ("eager", "fast"),
    "fallback": ("inductor", "eager", "error"),
    "verify": (True, False),
    "debug": (0, 1, 2, 3, 4),
    "check": (True, False),
    "cudagraphs": ("auto", True, False, "require"),
    "raw_fields": (True, False),
    "eager_if_faster": (True, False),
    "compile_debug": (True, False),
}
#: Values of an environment variable that turns something on or off; case is ignored.
SWITCH: dict[str, bool] = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
LEVELS: dict[str, int] = {
    **{name: int(on) for name, on in SWITCH.items()},
    **{str(level): level for level in range(5)},
}
GRAPHS: dict[str, bool | str] = {**SWITCH, "auto": "auto", "require": "require"}


def _known(of: Callable[..., Any] | None) -> list[str]:
    """The names of keywords that `of` takes, and of all options."""
    parameters = () if of is None else inspect.signature(of).parameters.values()
    keywords = [x.name for x in parameters if x.kind is x.KEYWORD_ONLY]
    return keywords + [f.name for f in fields(Config)]


def _checked(
    name: str, value: Any, said: str = "", of: Callable[..., Any] | None = None
) -> Any:
    """Return a value for an option if it is valid.

    `said`: the environment variable that holds the value. `of`: the function that was
    given the option. Raises ConfigError.
    """
    if name not in Config.__dataclass_fields__:
        known = _known(of)
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ConfigError(f"unknown option {name!r}{hint} Known: {', '.join(known)}")
    if isinstance(value, Path):
        value = str(value)
    if name == "batch_bytes":
        return _bytes(value, said or f"option {name}")
    choices = CHOICES.get(name)
    if choices is not None and value not in choices:
        where = said or f"option {name}"
        raise ConfigError(f"{where}={value!r}: expected one of {choices}")
    if choices is None and not isinstance(value, (str, type(None))):
        raise ConfigError(f"option {name}={value!r}: expected a path")
    return value


def _bytes(value: Any, where: str) -> int:
    """A number of bytes, given as a number or as its digits."""
    digits = value.strip() if isinstance(value, str) else value
    if isinstance(digits, str) and digits.isdecimal():
        digits = int(digits)
    if not isinstance(digits, int) or isinstance(digits, bool) or digits < 0:
        raise ConfigError(f"{where}={value!r}: expected a number of bytes")
    return digits


def switched_off(environ: Mapping[str, str] | None = None) -> frozenset[str]:
    """Names of the capabilities in FUSEOPT_WITHOUT, which fuseopt must not use."""
    said = (os.environ if environ is None else environ).get("FUSEOPT_WITHOUT", "")
    return frozenset(x.strip() for x in said.split(",") if x.strip())


def of_mode(mode: str | None) -> dict[str, Any]:
    """Options for a mode of torch.compile. Raises ConfigError."""
    if mode is not None and mode not in MODES:
        raise ConfigError(f"unknown mode {mode!r}; known: {', '.join(MODES)}")
    graphs = None if mode is None else MODES[mode]
    return {} if graphs is None else {"cudagraphs": graphs}


def resolve(
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    of: Callable[..., Any] | None = None,
) -> Config:
    """Return the Config of one `torch.compile` call. Raises ConfigError.

    `of`: the function of fuseopt that was given `options`; an error names its keywords.
    """
    env = os.environ if environ is None else environ
    by_mode = of_mode(mode)
    config = Config()
    for name, variable in (
        ("cache_dir", "FUSEOPT_CACHE_DIR"),
        ("dump_dir", "FUSEOPT_DUMP_DIR"),
        ("target", "FUSEOPT_TARGET"),
        ("batch_bytes", "FUSEOPT_BATCH_BYTES"),
    ):
        if env.get(variable):
            config = replace(config, **{name: _checked(name, env[variable], variable)})
    switches: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
        ("debug", "FUSEOPT_DEBUG", LEVELS),
        ("check", "FUSEOPT_CHECK", SWITCH),
        ("cudagraphs", "FUSEOPT_CUDAGRAPHS", GRAPHS),
        ("raw_fields", "FUSEOPT_RAW_FIELDS", SWITCH),
        ("eager_if_faster", "FUSEOPT_EAGER_IF_FASTER", SWITCH),
    )
    for name, variable, meanings in switches:
        said = env.get(variable, "").strip()
        if said:
            if said.lower() not in meanings:
                known = ", ".join(meanings)
                raise ConfigError(f"{variable}={said!r}: expected one of {known}")
            config = replace(config, **{name: meanings[said.lower()]})
    # torch's own variable, parsed as torch parses it
    if env.get("TORCH_COMPILE_DEBUG") == "1":
        config = replace(config, compile_debug=True)
    config = replace(config, **by_mode)
    given = {k: _checked(k, v, of=of) for k, v in (options or {}).items()}
    return replace(config, **given)
