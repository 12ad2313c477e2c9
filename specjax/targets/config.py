"""How a target is held in memory and run; imports nothing heavy."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """How a target is held in memory and run.

    Attributes:
        layer_loop: "unroll" runs the layers one by one, "scan" compiles one turn of the repeating
            pattern; "auto" scans where weights are packed (an unrolled loop would unpack all of
            them at once) and unrolls elsewhere.
        attention: "blocks", or "dot_product" for `jax.nn.dot_product_attention`.
        weights: of a quantised checkpoint: "packed" dequantises inside each step, "dequantised"
            once, at load.
    """

    layer_loop: Literal["auto", "unroll", "scan"] = "auto"
    attention: Literal["blocks", "dot_product"] = "blocks"
    weights: Literal["packed", "dequantised"] = "packed"
