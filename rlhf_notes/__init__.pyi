# The public names, for type checkers and for __init__.py, which imports each when it is asked for.
from . import fast as fast
from .compat.ding import *
from .compat.torchtune import *
from .control.trainer import PPO as PPO
from .exercises.check import check as check
from .formulas.advantage import *
from .formulas.credit import *
from .formulas.distillation import *
from .formulas.grpo import *
from .formulas.kl import *
from .formulas.logprob import *
from .formulas.masking import *
from .formulas.ppo import *
from .formulas.preference import *
from .formulas.ratio import *
from .formulas.reward import *
from .formulas.surrogate import *
from .formulas.value import *
from .formulas.whitening import *
from .hub.reward_trainer import RewardTrainer as RewardTrainer
from .hub.trainers import DPO as DPO
from .hub.trainers import RLHF as RLHF
from .identify import identify as identify

__version__: str
