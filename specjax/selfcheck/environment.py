"""What is installed and what does not fit together, as facts and as advice."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path

PLUGINS = ("jax-rocm", "jax-cuda")
_DRIVERS = {"rocm": "/dev/kfd", "cuda": "/dev/nvidiactl"}
_EXTRAS = {"rocm": "AMD GPU", "cuda": "NVIDIA GPU"}


@dataclasses.dataclass(frozen=True)
class Found:
    """What a machine has.

    Attributes:
        versions: of installed packages that matter, by name.
        platform: jax's default one: "cpu", "gpu", "rocm", "cuda", "tpu".
        drivers: kinds of GPU whose driver is loaded: "rocm", "cuda".
        variables: environment variables that jax looks at.
    """

    versions: Mapping[str, str]
    platform: str
    drivers: tuple[str, ...] = ()
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


def look() -> Found:
    """Look at this machine."""
    import jax

    names = {
        dist.metadata["Name"].lower(): dist.version
        for dist in importlib.metadata.distributions()
        if dist.metadata["Name"]
    }
    wanted = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")
    versions = {
        name: version
        for name, version in sorted(names.items())
        if name in wanted or name.startswith(PLUGINS)
    }
    device = jax.devices()[0]
    platform = device.platform
    if platform == "gpu":  # jax calls both kinds that
        platform = "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
    return Found(
        versions=versions,
        platform=platform,
        drivers=tuple(kind for kind, path in _DRIVERS.items() if Path(path).exists()),
        variables={
            name: os.environ[name]
            for name in (
                "JAX_PLATFORMS",
                "XLA_FLAGS",
                "HIP_VISIBLE_DEVICES",
                "CUDA_VISIBLE_DEVICES",
            )
            if name in os.environ
        },
    )


def problems(found: Found) -> list[str]:
    """Return what is wrong, each with what would be right; [] if nothing is."""
    out = []
    jax, lib = found.versions.get("jax", "?"), found.versions.get("jaxlib", "?")
    if jax.split(".")[:2] != lib.split(".")[:2]:
        out.append(f"jax {jax} with jaxlib {lib}: pip install jaxlib=={jax}")
    plugins = {
        name: version for name, version in found.versions.items() if name.startswith(PLUGINS)
    }
    for name, version in plugins.items():
        if version.split(".")[:3] != jax.split(".")[:3]:
            out.append(
                f"{name} {version} belongs to another jax than {jax}: install jax=={version}, or"
                f" {name}=={jax} if there is one"
            )
    kinds = {kind for kind in _DRIVERS if any(kind in name for name in plugins)}
    if len(kinds) > 1:
        out.append("plugins for AMD and for NVIDIA are both installed: keep one")
    for kind in found.drivers:
        if kind not in kinds:
            out.append(
                f"the driver of an {_EXTRAS[kind]} is loaded, but jax has no plugin for it:"
                f" pip install 'specjax[{kind}]'"
            )
    if kinds and found.platform == "cpu":
        chosen = found.variables.get("JAX_PLATFORMS", "")
        if chosen and "cpu" in chosen.split(",")[0]:
            out.append(f"JAX_PLATFORMS={chosen} keeps jax on the CPU although a plugin is there")
        elif not set(kinds) & set(found.drivers):
            (kind,) = list(kinds)[:1]
            out.append(
                f"a plugin for {kind} is installed, but its driver is not loaded ({_DRIVERS[kind]}"
                " is missing; in a container, pass the device in)"
            )
        else:
            out.append(
                "plugin and driver are there, but jax sees no device: check the permissions of the"
                " device files (groups render and video), and HIP_VISIBLE_DEVICES or"
                " CUDA_VISIBLE_DEVICES"
            )
    return out
