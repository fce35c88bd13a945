"""jlaqat: quantization-aware training of linear-attention models in JAX, rounding inside the kernels."""

from jlaqat.spec import DeltaQuant as DeltaQuant
from jlaqat.spec import QuantArrays as QuantArrays
from jlaqat.spec import QuantConfigError as QuantConfigError
from jlaqat.spec import QuantSpec as QuantSpec
from jlaqat.ops import delta_rule as delta_rule
from jlaqat.ops import delta_rule_step as delta_rule_step
