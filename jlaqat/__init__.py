"""jlaqat: quantization-aware training of linear-attention models in JAX, rounding inside the kernels."""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from jlaqat.attention import Attention as Attention
from jlaqat.decode import delta_rule_decode as delta_rule_decode
from jlaqat.decode import delta_rule_step as delta_rule_step
from jlaqat.decode_carry import DecodeCarry as DecodeCarry
from jlaqat.decode_policy import DecodePolicy as DecodePolicy
from jlaqat.generation import generate as generate
from jlaqat.kernel_calls import compile_for as compile_for
from jlaqat.layers import GatedDeltaNet as GatedDeltaNet
from jlaqat.layers import KimiDeltaAttention as KimiDeltaAttention
from jlaqat.model import DecoderLM as DecoderLM
from jlaqat.model import ModelConfig as ModelConfig
from jlaqat.model import count_params as count_params
from jlaqat.ops import delta_rule as delta_rule
from jlaqat.ops import delta_rule_observe as delta_rule_observe
from jlaqat.ops import delta_rule_recurrent as delta_rule_recurrent
from jlaqat.quantizers import Quantizer as Quantizer
from jlaqat.quantizers import QuantizerVariable as QuantizerVariable
from jlaqat.quantizers import calibrate as calibrate
from jlaqat.quantizers import disable_quantizer as disable_quantizer
from jlaqat.quantizers import enable_quantizer as enable_quantizer
from jlaqat.quantizers import find_quantizers as find_quantizers
from jlaqat.quantizers import finish_calibration as finish_calibration
from jlaqat.quantizers import freeze as freeze
from jlaqat.quantizers import observe as observe
from jlaqat.quantizers import quantize as quantize
from jlaqat.quantizers import quantizer_metrics as quantizer_metrics
from jlaqat.quantizers import quantizer_table as quantizer_table
from jlaqat.quantizers import set_step as set_step
from jlaqat.quantizers import strip_quantizers as strip_quantizers
from jlaqat.quantizers import summary as summary
from jlaqat.recipes import load_config as load_config
from jlaqat.recipes import load_recipe as load_recipe
from jlaqat.spec import DeltaQuant as DeltaQuant
from jlaqat.spec import QuantArrays as QuantArrays
from jlaqat.spec import QuantConfigError as QuantConfigError
from jlaqat.spec import QuantSpec as QuantSpec
from jlaqat.weights import fla_state_dict as fla_state_dict
from jlaqat.weights import load_fla_state_dict as load_fla_state_dict

# Training brings Orbax, Grain and TensorBoard writers with it: imported at the first use of one of these names.
if TYPE_CHECKING:
    from jlaqat.checkpoint import Checkpointer as Checkpointer
    from jlaqat.checkpoint import CheckpointMismatchError as CheckpointMismatchError
    from jlaqat.data import DataConfig as DataConfig
    from jlaqat.data import DataConfigError as DataConfigError
    from jlaqat.data import make_dataset as make_dataset
    from jlaqat.diagnosis import NonFiniteError as NonFiniteError
    from jlaqat.evaluation import evaluate as evaluate
    from jlaqat.export import export_stripped as export_stripped
    from jlaqat.export import load_weights as load_weights
    from jlaqat.optim import OptimizerConfig as OptimizerConfig
    from jlaqat.optim import make_optimizer as make_optimizer
    from jlaqat.preemption import Preempted as Preempted
    from jlaqat.study import StudyConfig as StudyConfig
    from jlaqat.study import run_study as run_study
    from jlaqat.train_config import TrainConfig as TrainConfig
    from jlaqat.train_step import DistillationConfig as DistillationConfig
    from jlaqat.train_step import TrainState as TrainState
    from jlaqat.train_step import create_train_state as create_train_state
    from jlaqat.train_step import make_train_step as make_train_step
    from jlaqat.train_step import split_packed as split_packed
    from jlaqat.train_step import update_model as update_model
    from jlaqat.training import TrainResult as TrainResult
    from jlaqat.training import train as train

_TRAINING = {
    "Checkpointer": "jlaqat.checkpoint",
    "CheckpointMismatchError": "jlaqat.checkpoint",
    "DataConfig": "jlaqat.data",
    "DataConfigError": "jlaqat.data",
    "make_dataset": "jlaqat.data",
    "NonFiniteError": "jlaqat.diagnosis",
    "evaluate": "jlaqat.evaluation",
    "export_stripped": "jlaqat.export",
    "load_weights": "jlaqat.export",
    "OptimizerConfig": "jlaqat.optim",
    "make_optimizer": "jlaqat.optim",
    "StudyConfig": "jlaqat.study",
    "run_study": "jlaqat.study",
    "Preempted": "jlaqat.preemption",
    "TrainConfig": "jlaqat.train_config",
    "DistillationConfig": "jlaqat.train_step",
    "TrainState": "jlaqat.train_step",
    "create_train_state": "jlaqat.train_step",
    "make_train_step": "jlaqat.train_step",
    "split_packed": "jlaqat.train_step",
    "update_model": "jlaqat.train_step",
    "TrainResult": "jlaqat.training",
    "train": "jlaqat.training",
}


__all__ = sorted(
    {name for name, value in globals().items() if getattr(value, "__module__", "").startswith("jlaqat.")}
    | set(_TRAINING)
)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("jlaqat")
    if name not in _TRAINING:
        raise AttributeError(f"module 'jlaqat' has no attribute {name!r}")
    return getattr(importlib.import_module(_TRAINING[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_TRAINING])
