"""Which names a configuration may set: the configurables, their parameters and their docs.

A configurable is a frozen dataclass or an entry function. It is named here by module path and
imported when a configuration first mentions it, so this module stays light. The modules named
import nothing heavy either, for `--help` imports them all.
"""

import dataclasses
import functools
import importlib
import inspect
import re
import typing
from collections.abc import Callable, Iterable
from typing import Any

from specjax.core import fieldtypes
from specjax.core.errors import ConfigError, nearest

REGISTRY: dict[str, str | Callable[..., Any]] = {
    "Eval": "specjax.evaluation.config:EvalConfig",
    "Sweep": "specjax.evaluation.config:SweepConfig",
    "Tune": "specjax.evaluation.tune_config:TuneConfig",
    "Engine": "specjax.decode.config:EngineConfig",
    "Target": "specjax.targets.config:TargetConfig",
    "Trainer": "specjax.training.config:TrainerConfig",
    "Optim": "specjax.training.config:OptimConfig",
    "Data": "specjax.training.config:DataConfig",
    "Features": "specjax.training.features.config:FeaturesConfig",
    "Mesh": "specjax.core.mesh_config:MeshConfig",
    "Plan": "specjax.planner.config:PlanConfig",
    "Ngram": "specjax.heads.plain_config:NgramConfig",
    "Objective": "specjax.heads.objective_config:Objective",
    "DFlash": "specjax.heads.dflash.config:DFlashConfig",
    "Mtp": "specjax.heads.mtp.config:MtpConfig",
    "Gemma4Mtp": "specjax.heads.gemma4_mtp.config:Gemma4MtpConfig",
    "Eagle3": "specjax.heads.eagle3.config:Eagle3Config",
}

REQUIRED = dataclasses.MISSING


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One thing that a configuration can set.

    Attributes:
      configurable: the name before the dot.
      name: the name after the dot.
      annotation: its type, resolved.
      default: its value when unset, or `REQUIRED`.
      doc: its line in the docstring.
    """

    configurable: str
    name: str
    annotation: Any
    default: Any
    doc: str

    @property
    def type(self) -> str:
        """The annotation as a user reads it."""
        return nested_name(self.annotation) or fieldtypes.type_name(self.annotation)


def register(name: str, target: str | Callable[..., Any]) -> None:
    """Make a dataclass or function configurable.

    Args:
      name: what configurations call it.
      target: the object, or "module:name" to import it when first used.

    Raises:
      ConfigError: if the name is taken by something else.
    """
    if REGISTRY.setdefault(name, target) != target:
        raise ConfigError(f"the configurable name {name!r} is taken by {REGISTRY[name]}")


def lookup(name: str, where: str = "") -> Callable[..., Any]:
    """The dataclass or function that a name stands for.

    Args:
      name: a configurable's name.
      where: where the name was written, for the message.

    Raises:
      ConfigError: if there is no such configurable.
    """
    if name not in REGISTRY:
        raise ConfigError(f"{where}no configurable named {name!r}{nearest(name, REGISTRY)}")
    target = REGISTRY[name]
    if isinstance(target, str):
        module, _, attribute = target.partition(":")
        target = getattr(importlib.import_module(module), attribute)
    return typing.cast(Callable[..., Any], target)


def parameters(name: str, where: str = "") -> dict[str, Parameter]:
    """The parameters of a configurable, by name, in the order of its signature."""
    target = lookup(name, where)
    return {
        key: Parameter(name, key, annotation, default, doc)
        for key, annotation, default, doc in _describe(target)
    }


def nested_name(annotation: Any) -> str | None:
    """The name under which a dataclass annotation is configurable, None if it is not."""
    if not (isinstance(annotation, type) and dataclasses.is_dataclass(annotation)):
        return None
    for name, target in REGISTRY.items():
        if target in (annotation, f"{annotation.__module__}:{annotation.__qualname__}"):
            return name
    return None


def table(names: Iterable[str] | None = None) -> list[Parameter]:
    """Every parameter of the given configurables (all if None), for `--help` and for hints."""
    return [row for name in names or REGISTRY for row in parameters(name).values()]


@functools.cache
def _describe(target: Callable[..., Any]) -> tuple[tuple[str, Any, Any, str], ...]:
    hints = typing.get_type_hints(target)
    docs = _parameter_docs(target)
    if isinstance(target, type):
        fields = [field for field in dataclasses.fields(target) if field.init]
        defaults = {
            field.name: field.default
            if field.default_factory is dataclasses.MISSING
            else field.default_factory()
            for field in fields
        }
    else:
        defaults = {
            name: REQUIRED if parameter.default is parameter.empty else parameter.default
            for name, parameter in inspect.signature(target).parameters.items()
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        }
    return tuple(
        (name, hints.get(name, Any), default, docs.get(name, ""))
        for name, default in defaults.items()
    )


def _parameter_docs(target: Callable[..., Any]) -> dict[str, str]:
    """The lines of a google docstring's `Attributes:` or `Args:` section, one per name."""
    lines = (inspect.getdoc(target) or "").splitlines()
    heads = [i for i, line in enumerate(lines) if line.strip() in ("Attributes:", "Args:")]
    docs: dict[str, str] = {}
    indent, name = 0, ""
    for line in lines[heads[0] + 1 :] if heads else ():
        if not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        if depth == 0:
            break
        indent = indent or depth
        entry = re.match(r"(\w+)(?: \([^)]*\))?: (.*)", line.strip()) if depth == indent else None
        if entry:
            name, docs[entry[1]] = entry[1], entry[2]
        elif name:
            docs[name] += " " + line.strip()
    return docs
