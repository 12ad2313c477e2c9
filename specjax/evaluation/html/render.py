"""Templates of the pages, and what all of them have."""

from __future__ import annotations

from typing import Any

from specjax.evaluation.html import palette


def render(template: str, **values: Any) -> str:
    """Fill one of the templates; text is escaped, colours come with it."""
    import jinja2

    loader = jinja2.PackageLoader("specjax.evaluation.html")
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    light, dark = palette.variables(False), palette.variables(True)
    return environment.get_template(template).render(light=light, dark=dark, **values)
