"""jlaqat: quantization-aware training of linear-attention models in JAX, rounding inside the kernels."""

from jlaqat.attention import Attention as Attention
from jlaqat.generation import generate as generate
from jlaqat.layers import GatedDeltaNet as GatedDeltaNet
from jlaqat.layers import KimiDeltaAttention as KimiDeltaAttention
from jlaqat.model import DecoderLM as DecoderLM
from jlaqat.model import ModelConfig as ModelConfig
from jlaqat.model import count_params as count_params
from jlaqat.ops import delta_rule as delta_rule
from jlaqat.ops import delta_rule_step as delta_rule_step
from jlaqat.spec import DeltaQuant as DeltaQuant
from jlaqat.spec import QuantArrays as QuantArrays
from jlaqat.spec import QuantConfigError as QuantConfigError
from jlaqat.spec import QuantSpec as QuantSpec
from jlaqat.weights import fla_state_dict as fla_state_dict
from jlaqat.weights import load_fla_state_dict as load_fla_state_dict
