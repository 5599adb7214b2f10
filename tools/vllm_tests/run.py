"""vLLM's own tests of attention backends on ours: several processes, one JSON.

    python tools/vllm_tests/run.py stage SOURCES STAGED
    python tools/vllm_tests/run.py run STAGED --out OUT [--sample 4000] [--seed 0] [--jobs 8] [--seconds 300]

``SOURCES`` is the source archive of vLLM's release, ``vllm-VERSION.tar.gz`` of the package index; ``run`` needs that
version of vLLM and our package on PYTHONPATH. Nothing of it belongs into this repository. ``OUT/vllm_tests.json`` says
for each test function how many passed, failed or were refused, why, and which failed. The exit status is 1 if a test
failed or fewer than ``--at-least`` ran. ``--collect`` lists the sample, ``--only TEXT`` is pytest's ``-k``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
from pathlib import Path, PurePath
from typing import Any

HERE = Path(__file__).resolve().parent
FLASHINFER = HERE.parent / "flashinfer_tests"
sys.path.insert(0, str(FLASHINFER))  # whose modules have the names of ours

import run as flashinfer_run  # type: ignore[import-not-found]  # noqa: E402

NAME = "vllm_tests"
FOLDER = "tests/v1/attention"
TESTS = ("test_attention_backends.py", "test_mla_backends.py", "test_sparse_mla_backends.py")
FILES = (*TESTS, "utils.py")
PACKAGES = ("tests", "tests/v1", FOLDER)


def model(architecture: str, model_type: str, **sizes: object) -> dict[str, Any]:
    """A configuration of which attention and vLLM's own checks read no more than this."""
    return {"architectures": [architecture], "model_type": model_type, "dtype": "bfloat16", **sizes}


DEEPSEEK = model(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    hidden_size=7168,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    num_hidden_layers=61,
    num_attention_heads=128,
    num_key_value_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=256,
    num_experts_per_tok=8,
    vocab_size=129280,
    max_position_embeddings=163840,
)
# By the names that the tests have.
MODELS = {
    "meta-llama/Meta-Llama-3-8B": model(
        "LlamaForCausalLM",
        "llama",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
    ),
    "microsoft/Phi-tiny-MoE-instruct": model(
        "PhiMoEForCausalLM",
        "phimoe",
        hidden_size=4096,
        intermediate_size=448,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        sliding_window=2047,
        num_local_experts=16,
        num_experts_per_tok=2,
        vocab_size=32064,
        max_position_embeddings=4096,
    ),
    "google/embeddinggemma-300m": model(
        "Gemma3TextModel",
        "gemma3_text",
        hidden_size=768,
        intermediate_size=1152,
        num_hidden_layers=24,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        use_bidirectional_attention=True,
        vocab_size=262144,
        max_position_embeddings=2048,
    ),
    "deepseek-ai/DeepSeek-R1": DEEPSEEK,
    "deepseek-ai/DeepSeek-V2-Lite-Chat": {
        **DEEPSEEK,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
    },
}


def main() -> int:
    """Stage the tests, or run them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    staging = verbs.add_parser("stage")
    staging.add_argument("sources", type=Path)
    staging.add_argument("staged", type=Path)
    running = verbs.add_parser("run")
    flashinfer_run.add_options(running, sample=4000, at_least=500, jobs=8, seconds=300)
    given = parser.parse_args()
    return stage(given) if given.verb == "stage" else run(given)


def stage(given: argparse.Namespace) -> int:
    """Pack the test files of a release."""
    from stage import add

    with tarfile.open(given.sources) as sources, tarfile.open(given.staged, "w:xz") as archive:
        names = sources.getnames()
        release = PurePath(names[0]).parts[0]
        add(archive, "staged.json", json.dumps({"tests": release}).encode())
        for name in FILES:
            member = sources.extractfile(f"{release}/{FOLDER}/{name}")
            assert member is not None, name
            add(archive, f"{FOLDER}/{name}", member.read())
    return 0


def run(given: argparse.Namespace) -> int:
    """Run the tests and write the report."""
    # Without pytest's handler of logs, for which torch would write a trace of every compilation.
    command = [*flashinfer_run.pytest_command(given, f"{FOLDER}/{TESTS[0]}"), "-p", "no:logging"]
    command += [f"{FOLDER}/{name}" for name in TESTS[1:]]
    return int(flashinfer_run.run_staged(given, NAME, command, environment, summary, prepare))


def prepare(folder: Path) -> None:
    """Complete the tests' packages and write the models, which they find under their names."""
    for package in PACKAGES:
        (folder / package / "__init__.py").touch()
    for name, configuration in MODELS.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(configuration))


def environment(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """The environment of a process: the tests from ``folder``, vLLM and our package from PYTHONPATH."""
    variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    variables["VLLM_TESTS"] = json.dumps(settings)
    return dict(flashinfer_run.around(HERE, FLASHINFER, folder, **variables))


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts by test function, why tests were refused or skipped, and the failures."""
    for record in records:
        if "test" in record:  # the function in the place of the file
            file, _, test = record["test"].partition("::")
            record["test"] = f"{PurePath(file).name}: {test}".replace("[", "::[", 1)
    result: dict[str, Any] = flashinfer_run.summary(records)
    result["functions"] = result.pop("files")
    return result


if __name__ == "__main__":
    sys.exit(main())
