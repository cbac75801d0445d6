"""An eviction policy of one's own, compared with two known ones on a language model.

    python examples/own_policy.py [MODEL TEXT]

The policy keeps the first tokens, the latest ones, and of those between them every one whose key has a low norm.
MODEL is a folder with an ONNX decoder, or a name that `kvmnn model pull` has fetched.
Needs the extra lm.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvmnn.evaluation import EvaluationSettings
from kvmnn.lm import evaluate
from kvmnn.policies import BudgetedPolicy, PolicyInput
from kvmnn.policies.topk import select_middle_topk

FIXTURES = Path(__file__).parent.parent / "fixtures"


@dataclass(frozen=True, kw_only=True)
class LowNorms(BudgetedPolicy):
    """Keep `sink` first tokens, half of the budget as the latest ones, and the lowest key norms between them."""

    name = "low_norms"
    requires = "keys"
    sink: int = 4

    def select_tokens(self, state: PolicyInput) -> npt.NDArray[np.int64] | None:
        size = self.resolve_budget(state.tokens)
        if state.tokens <= size:
            return None
        recent = size // 2
        count = size - recent - self.sink
        norms = state.get_key_norms()
        return select_middle_topk(norms, state.tokens, sink=self.sink, count=count, recent=recent, highest=False)


model, text = sys.argv[1:] or (FIXTURES / "lm", FIXTURES / "lm" / "texts" / "trace.py.txt")
result = evaluate(
    model,
    text,
    ["recent_only:budget=128", "streaming:budget=128", LowNorms(budget=128)],
    settings=EvaluationSettings(tokens=512, chunk=16),
)
print(result)
