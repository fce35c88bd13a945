"""jlaqat: quantization-aware training of linear-attention models in JAX, with the rounding inside the chunked kernel."""

from jlaqat.spec import DeltaQuant as DeltaQuant
from jlaqat.spec import QuantArrays as QuantArrays
from jlaqat.spec import QuantConfigError as QuantConfigError
from jlaqat.spec import QuantSpec as QuantSpec
