"""What settings mean: checked bindings, and the objects built from them.

Plain data in, dataclasses out; how settings are written (gin, the command line) is the affair of
`specjax.config`.
"""

import dataclasses
import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax import __version__
from specjax.configurables import REQUIRED, Parameter, lookup, nested_name, parameters, table
from specjax.core.errors import ConfigError, nearest
from specjax.core.fieldtypes import MismatchError, coerce


@dataclasses.dataclass(frozen=True)
class Macro:
    """`%name` in a value."""

    name: str


@dataclasses.dataclass(frozen=True)
class Reference:
    """`@scope/Name()` in a value: what building that configurable gives."""

    name: str
    called: bool = True


class Binding(NamedTuple):
    """One setting as written.

    `name` is the configurable, empty for a macro, whose own name is then `parameter`. `text` is
    the raw value of a command line, where text needs no quotes; None in files.
    """

    scope: str
    name: str
    parameter: str
    value: Any
    where: str
    text: str | None = None

    @property
    def key(self) -> str:
        """The name as a user writes it: `scope/Name.parameter`."""
        return _key(self.scope, self.name, self.parameter)


def _key(scope: str, name: str, parameter: str) -> str:
    scoped = f"{scope}/{name}" if scope else name
    return f"{scoped}.{parameter}" if name else f"{scoped}{parameter}"


class Config:
    """The settings of one run, and the record of what was built from them."""

    def __init__(self, bindings: Sequence[Binding]) -> None:
        """Check the settings against the configurables; see `parse`."""
        self._given = tuple(bindings)
        self._macros = {b.key: b for b in bindings if not b.name}
        self._bindings = {b.key: b for b in bindings if b.name}
        self._used: set[str] = set()
        self._record: dict[tuple[str, str], dict[str, Any]] = {}
        self._varying: set[tuple[str, str, str]] = set()
        used_macros: set[str] = set()
        for key, binding in self._bindings.items():
            self._bindings[key] = self._checked(binding, used_macros)
        for key, macro in self._macros.items():
            if key not in used_macros:
                raise _unused_macro(macro)

    def override(self, values: Mapping[str, Any], where: str) -> "Config":
        """The same settings with some of them replaced.

        Args:
          values: by `Name.parameter`.
          where: what asked for them, for messages.

        Raises:
          ConfigError: for a name or value that cannot be.
        """
        config = Config(self._given)
        for key, value in values.items():
            name, _, parameter = key.rpartition(".")
            binding = Binding("", name, parameter, value, where, str(value))
            config._bindings[key] = config._checked(binding, set())
        return config

    def build(self, name: str, scope: str = "", **given: Any) -> Any:
        """Build a configurable from its bindings and defaults.

        A field whose type is itself a configurable dataclass is built from that one's bindings;
        what those leave open comes from the field's own default.

        Args:
          name: the configurable.
          scope: the scope to enter: `scope/Name.x=1` then goes before `Name.x=1`.
          **given: parameters that the caller decides; they are not configurable here.

        Returns:
          The dataclass instance, or what the function returns.

        Raises:
          ConfigError: if a required value is missing or a value is refused by the dataclass.
        """
        return self._build(name, scope, given, None)

    def check_all_used(self) -> None:
        """Refuse bindings that no `build` has used; call it after the last one.

        Raises:
          ConfigError: names the first of them and why it had no effect.
        """
        for key, binding in self._bindings.items():
            if key in self._used:
                continue
            if binding.name not in {name for _, name in self._record}:
                why = f"this run uses no {binding.name}"
            elif binding.scope and (binding.scope, binding.name) not in self._record:
                why = f"no {binding.name} is built in a scope {binding.scope!r}"
            else:
                why = "this command decides it by itself"
            raise ConfigError(f"{key} is set {binding.where} but has no effect: {why}")

    def operative(self) -> str:
        """Everything that was built, as a gin file which replays it: used values and defaults."""
        lines = [f"# Operative configuration of SpecJAX {__version__}: replay with --gin_file."]
        for (scope, name), values in sorted(self._record.items()):
            lines.append("")
            for parameter, value in values.items():
                if (scope, name, parameter) not in self._varying:
                    lines.append(f"{_key(scope, name, parameter)} = {_literal(value)}")
        return "\n".join(lines) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `operative()` to a file, atomically."""
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        temporary.write_text(self.operative(), encoding="utf-8")
        os.replace(temporary, target)

    def _build(self, name: str, scope: str, given: Mapping[str, Any], base: Any) -> Any:
        target = lookup(name)
        record = self._record.setdefault((scope, name), {})
        arguments = dict(given)
        for key, parameter in parameters(name).items():
            if key in given:
                continue
            value, recorded = self._value(parameter, scope, base)
            arguments[key] = value
            if recorded is REQUIRED:
                continue
            if record.setdefault(key, recorded) != recorded:
                self._varying.add((scope, name, key))
        try:
            return target(**arguments)
        except (TypeError, ValueError) as error:
            if not isinstance(target, type):
                raise  # an entry function is a whole program: its errors are its own
            raise ConfigError(f"{name}: {error}") from error

    def _value(self, parameter: Parameter, scope: str, base: Any) -> tuple[Any, Any]:
        """The value of one parameter, and what the operative configuration says of it."""
        binding = self._find(parameter, scope)
        if binding is not None:
            # Again, because what a reference builds is known only now.
            value = _typed(binding, self._follow(binding.value, scope), parameter)
            return value, binding.value
        default = parameter.default if base is None else getattr(base, parameter.name)
        nested = nested_name(parameter.annotation)
        if nested:
            return self._build(
                nested, scope, {}, None if default is REQUIRED else default
            ), REQUIRED
        if default is REQUIRED:
            key = f"{parameter.configurable}.{parameter.name}"
            raise ConfigError(f"{key} has no value: set {key}=<{parameter.type}>")
        return default, default

    def _find(self, parameter: Parameter, scope: str) -> Binding | None:
        """The binding for a parameter in a scope: the innermost, all that apply count as used."""
        found = None
        levels = scope.split("/") if scope else []
        for depth in range(len(levels) + 1):
            key = _key("/".join(levels[:depth]), parameter.configurable, parameter.name)
            if key in self._bindings:
                self._used.add(key)
                found = self._bindings[key]
        return found

    def _follow(self, value: Any, scope: str) -> Any:
        """The value with its references built."""
        if isinstance(value, Reference):
            inner, _, name = value.name.rpartition("/")
            return self._build(name, inner or scope, {}, None)
        if isinstance(value, list | tuple):
            return type(value)(self._follow(item, scope) for item in value)
        if isinstance(value, dict):
            return {key: self._follow(item, scope) for key, item in value.items()}
        return value

    def _checked(self, binding: Binding, used_macros: set[str]) -> Binding:
        """The binding with macros replaced and its value brought to the parameter's type."""
        where = f"{binding.key} {binding.where}: "
        known = parameters(binding.name, where)
        if binding.parameter not in known:
            raise ConfigError(
                f"{where}{binding.name} has no parameter {binding.parameter!r}"
                f"{nearest(binding.parameter, known)}"
            )
        value = self._expand(binding.value, where, (), used_macros)
        references = [item for item in _leaves(value) if isinstance(item, Reference)]
        for reference in references:
            lookup(reference.name.rpartition("/")[2], where)
            if not reference.called:
                raise ConfigError(f"{where}@{reference.name} needs parentheses")
        if value != binding.value:  # what a macro stands for is no text of this line
            binding = binding._replace(text=None)
        if not references:
            value = _typed(binding, value, known[binding.parameter])
        return binding._replace(value=value, text=None)

    def _expand(self, value: Any, where: str, above: tuple[str, ...], used: set[str]) -> Any:
        if isinstance(value, Macro):
            if value.name in above:
                raise ConfigError(f"{where}the macro %{value.name} is defined by itself")
            if value.name not in self._macros:
                raise ConfigError(
                    f"{where}no macro %{value.name}{nearest(value.name, self._macros)}"
                )
            used.add(value.name)
            return self._expand(self._macros[value.name].value, where, (*above, value.name), used)
        if isinstance(value, list | tuple):
            return type(value)(self._expand(item, where, above, used) for item in value)
        if isinstance(value, dict):
            return {key: self._expand(item, where, above, used) for key, item in value.items()}
        return value


def _typed(binding: Binding, value: Any, parameter: Parameter) -> Any:
    """The value brought to the parameter's type, or the error that says what it takes."""
    try:
        return coerce(value, parameter.annotation)
    except MismatchError:
        pass
    if binding.text is not None:  # a path such as 2024 is text where text is wanted
        try:
            return coerce(binding.text, parameter.annotation)
        except MismatchError:
            pass
    raise ConfigError(f"{binding.key} takes {parameter.type}, got {value!r} {binding.where}")


def _leaves(value: Any) -> Iterator[Any]:
    """Everything inside nested containers."""
    if isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value


def _literal(value: Any) -> str:
    """A value as gin writes it."""
    if isinstance(value, Reference):
        return f"@{value.name}()"
    if isinstance(value, tuple):
        return "(" + "".join(f"{_literal(item)}, " for item in value).rstrip() + ")"
    if isinstance(value, list):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    if isinstance(value, dict):
        items = (f"{_literal(key)}: {_literal(item)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if value is not None and not isinstance(value, str | int | float):
        raise TypeError(f"a configuration cannot hold {value!r}: it has no literal form")
    return repr(value)


def _unused_macro(macro: Binding) -> ConfigError:
    """The error for `steps=3`, most often a parameter without its configurable."""
    keys = [f"{row.configurable}.{row.name}" for row in table()]
    names = [key.partition(".")[2] for key in keys]
    close = difflib.get_close_matches(macro.parameter, names, n=1)
    meant = [key for key, name in zip(keys, names, strict=True) if name in close]
    hint = f"; did you mean {' or '.join(meant)}?" if meant else ""
    return ConfigError(f"{macro.key} is set {macro.where} but nothing uses %{macro.key}{hint}")
