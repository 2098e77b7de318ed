"""Whether the suite notices that the core is broken: one line at a time is, in a copy, and the tests are run.

    uv run --group dev python benchmarks/mutations.py [--full] [--only N,N,...]

A line is found by its text, wherever it stands. First come the tests that should notice, then, if they do not, all
others; `--full` has those of `.ci/run` as well. It ends with code 1 if the short suite notices less than 90 %, or
the full one less than all.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
NO_CORE = ("tests", "testing", "benchmarks", "examples", "reproduce", "docs", "docker", "results")
FULL = re.compile(r"pytest (-m \"[^\"]*\")")
"""What `.ci/run` selects."""


@dataclass(frozen=True)
class Mutation:
    """A line of the core, what it is broken to, and the functions of tests that should notice (`NAME[CASE]`)."""

    what: str
    line: str
    broken: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "sign of a gradient step",
        "torch._foreach_add_(self.values, list(direction), alpha=-rate)",
        "torch._foreach_add_(self.values, list(direction), alpha=rate)",
        ("test_on_a_quadratic_each_step_shrinks_the_model_by_one_minus_the_learning_rate",),
    ),
    Mutation(
        "momentum's factor",
        "torch._foreach_mul_(self._velocity, self.momentum)",
        "torch._foreach_mul_(self._velocity, 1 - self.momentum)",
        ("test_momentum_and_weight_decay_by_hand",),
    ),
    Mutation(
        "weight of a client in the mean",
        "torch._foreach_add_(self._sums, [tensors[name] for name in self._names], alpha=weight)",
        "torch._foreach_add_(self._sums, [tensors[name] for name in self._names], alpha=1.0)",
        ("test_equals_numpys_weighted_mean",),
    ),
    Mutation(
        "round in the key of the mini-batches",
        "generators = [torch_generator(self.seed, client, round_, purpose) for client in clients]",
        "generators = [torch_generator(self.seed, client, 0, purpose) for client in clients]",
        ("test_batches_depend_on_seed_client_round_and_purpose_alone",),
    ),
    Mutation(
        "round in the key of the cohort",
        'generator = numpy_generator(self.run.seed, "server", server_round, "cohort")',
        'generator = numpy_generator(self.run.seed, "server", 0, "cohort")',
        ("test_the_cohort_depends_on_seed_and_round_and_not_on_who_is_there",),
    ),
    Mutation(
        "upper bound of the screening",
        "if not -largest <= low <= high <= largest:",
        "if not -largest <= low <= high:",
        ("test_a_finite_but_absurd_value_is_refused",),
    ),
    Mutation(
        "type of a reply's tensor",
        "if array.dtype != dtype:",
        "if array.dtype not in (dtype, 'float16'):",
        (
            "test_each_reason_names_the_tensor",
            "test_a_client_that_sends_bad_tensors_is_left_out_and_named[fedavg]",
        ),
    ),
    Mutation(
        "quorum rounded down",
        "need = math.ceil(round(quorum * asked, 9))  # 0.55 * 20 is a little more than 11",
        "need = math.floor(round(quorum * asked, 9))",
        ("test_the_quorum_is_of_those_asked",),
    ),
    Mutation(
        "length of the log in a checkpoint",
        "log_bytes=checkpoint.log_bytes,",
        "log_bytes=0,",
        ("test_a_checkpoint_comes_back_as_it_was", "test_resumed_run_equals_unbroken_run[fedavg]"),
    ),
    Mutation(
        "server state in a checkpoint",
        'return {"anchor": self.anchor, "updates": {"count": torch.tensor(self.updates)}}',
        'return {"updates": {"count": torch.tensor(self.updates)}}',
        ("test_the_anchor_goes_on_in_another_process", "test_resumed_run_equals_unbroken_run[fediir]"),
    ),
    Mutation(
        "checksum of a checkpoint",
        "if digest != _digest(path / name):",
        "if not digest:",
        ("test_one_flipped_bit_is_found",),
    ),
    Mutation(
        "first round after a resume",
        "for number in range(origin.round + 1, end + 1):",
        "for number in range(max(origin.round, 1), end + 1):",
        ("test_resumed_run_equals_unbroken_run[fedavg]",),
    ),
    Mutation(
        "what clients kept after the round of a resume",
        "(v for v in versions if all(v.round <= start for start in resumed[v.attempt :])),",
        "(v for v in versions if all(v.round <= start for start in resumed[v.attempt + 1 :])),",
        ("test_valid_by_hand", "test_resumed_run_equals_unbroken_run[ditto]"),
    ),
    Mutation(
        "half of the proximal term",
        'return risk + self.hparams.proximity / 2 * distance, {**metrics, "distance": distance}',
        'return risk + self.hparams.proximity * distance, {**metrics, "distance": distance}',
        ("test_the_steps_are_the_papers",),
    ),
    Mutation(
        "square of the IRM penalty",
        "return slopes(outputs, targets).mean().square()",
        "return slopes(outputs, targets).mean().abs()",
        ("test_point_check_of_the_test_bed", "test_the_shared_loss_takes_the_clients_environments_as_one"),
    ),
    Mutation(
        "moving average of FedIIR's anchor",
        "self.anchor = mix(self.anchor, gradient, 1 - self.hparams.anchor_ema)",
        "self.anchor = mix(self.anchor, gradient, self.hparams.anchor_ema)",
        ("test_the_anchor_is_kept_between_rounds",),
    ),
    Mutation(
        "negative group of the geometric mean",
        "return (self._group(positive, up) - self._group(negative, down)).where(agrees, 0.0)",
        "return (self._group(positive, up) + self._group(negative, down)).where(agrees, 0.0)",
        ("test_golden_values",),
    ),
    Mutation(
        "growth of GroupDRO's weights",
        "self.q[reply.client] *= math.exp(min(max(self.hparams.group_rate * risk, 0.0), 700.0))",
        "self.q[reply.client] *= math.exp(min(max(self.hparams.group_rate * risk / 2, 0.0), 700.0))",
        ("test_the_weights_grow_with_the_risk_and_are_sent_n_times",),
    ),
    Mutation(
        "scale of the noise for privacy",
        "means = unflattened(self._with_noise(updates.result(), multiplier * norm / clients))",
        "means = unflattened(self._with_noise(updates.result(), multiplier / clients))",
        ("test_the_noise_belongs_to_the_norm_that_clipped", "test_the_noise_is_of_those_who_answered"),
    ),
    Mutation(
        "clipping for privacy",
        "if length <= norm:",
        "if length <= norm or length > 10 * norm:",
        ("test_a_client_that_sends_anything_moves_the_model_by_no_more_than_its_share",),
    ),
    Mutation(
        "sign of the masks of secure aggregation",
        "return common if client < rival else np.negative(common)",
        "return common",
        ("test_the_masks_of_a_pair_cancel_and_hide_every_bit",),
    ),
    Mutation(
        "who must stay beside colluders",
        "if threshold < colluders + 2:  # of so many survivors, two are honest, and hide in each other's masks",
        "if threshold < colluders + 1:",
        ("test_a_threshold_that_leaves_one_honest_client_alone_is_refused",),
    ),
    Mutation(
        "neighbours of Multi-Krum",
        "scores = _squares(gram).sort(dim=1).values[:, 1:keep].sum(dim=1)",
        "scores = _squares(gram).sort(dim=1).values[:, 1 : keep - 1].sum(dim=1)",
        ("test_multi_krum_sums_over_as_many_neighbours_as_there_are_honest_others",),
    ),
    Mutation(
        "score of `split`",
        "score=min(a, d),",
        "score=(a + d) / 2,",
        ("test_accuracy_where_the_shortcut_agrees_with_probability_p", "test_colour_shape_and_coin"),
    ),
    Mutation(
        "round that validation picks",
        "return max(scores, key=lambda number: (scores[number], -number)) if scores else None",
        "return max(scores, key=lambda number: (scores[number], number)) if scores else None",
        ("test_validation_takes_the_earliest_of_equals_and_never_looks_at_the_test",),
    ),
    Mutation(
        "environments of an evaluation's counts",
        'metrics[f"{place}/correct"] = column([s.correct for s in scores])',
        'metrics[f"{place}/correct"] = column([s.correct for s in reversed(scores)])',
        ("test_evaluation_counts_by_model_split_and_environment",),
    ),
    Mutation(
        "worst environment",
        '"worst": min(test.values(), default=None),',
        '"worst": max(test.values(), default=None),',
        ("test_worst_average_and_clients_by_hand",),
    ),
    Mutation(
        "probability of a colour in an environment",
        "return flip(labels, 1 - agreement, generator)",
        "return flip(labels, agreement, generator)",
        ("test_colour_agrees_with_the_label_at_its_probability",),
    ),
    Mutation(
        "random order of a partition",
        "return np.array_split(rng.permutation(n), parts)",
        "return np.array_split(np.arange(n), parts)",
        ("test_iid_depends_on_the_seed_and_is_in_random_order",),
    ),
    Mutation(
        "type of bfloat16 on the wire",
        "tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor",
        "tensor = tensor.half() if tensor.dtype == torch.bfloat16 else tensor",
        ("test_bfloat16_travels_as_float32_without_loss",),
    ),
    Mutation(
        "which plug-ins a site imports",
        "return bool(place) or is_installed(module)",
        "return True",
        ("test_a_site_imports_only_what_its_owner_installed_or_named",),
    ),
    Mutation(
        "certificates of callers",
        "return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)",
        "return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=False)",
        ("test_with_a_client_ca_only_whom_it_vouches_for_gets_through",),
    ),
    Mutation(
        "tokens of callers",
        "if not matches:",
        "if not matches and not shown:",
        ("test_with_tokens_only_who_shows_one_gets_answers_and_health_is_open",),
    ),
    Mutation(
        "names in the tables of the report's page",
        """f'<th scope="col" class="{kind}">{escape(name)}</th>' for kind, name in zip(kinds, table.head, strict=True)""",  # noqa: E501
        """f'<th scope="col" class="{kind}">{name}</th>' for kind, name in zip(kinds, table.head, strict=True)""",
        ("test_names_from_files_are_only_text",),
    ),
)


def copied(to: Path) -> None:
    """A copy of all files that git knows, links as links, and of the uncommitted ones."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        place, source = to / name, ROOT / name
        if source.exists() or source.is_symlink():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, place, follow_symlinks=False)


def found(tree: Path, text: str) -> Path:
    """The one file of the core that has a line with this text once. Raises `SystemExit`."""
    files = [
        path
        for path in sorted(tree.rglob("*.py"))
        if path.relative_to(tree).parts[0] not in NO_CORE and not path.relative_to(tree).parts[0].startswith(".")
    ]
    places = {path.resolve(): path.read_text(encoding="utf-8").count(text) for path in files}
    there = [path for path, count in places.items() for _ in range(count)]
    if len(there) != 1:
        raise SystemExit(f"{len(there)} lines have {text!r}; a mutation needs one: {', '.join(map(str, there))}")
    return there[0]


def nodes(tree: Path, names: tuple[str, ...]) -> list[str]:
    """The tests with these functions, wherever they are; those that every method has are run from their file."""
    found = []
    for name in names:
        define = f"def {name.partition('[')[0]}("
        for path in sorted((tree / "tests").rglob("test_*.py")):
            text = path.read_text(encoding="utf-8")
            taken = re.findall(r"from perennial\.(testing[\w.]*) import \*", text)
            texts = [text, *((tree / f"{own.replace('.', '/')}.py").read_text(encoding="utf-8") for own in taken)]
            if any(define in each for each in texts):
                found.append(f"{path.relative_to(tree)}::{name}")
    return found


@contextmanager
def broken(tree: Path, mutation: Mutation) -> Iterator[None]:
    """The copy with the line broken, and whole again."""
    path = found(tree, mutation.line)
    whole = path.read_text(encoding="utf-8")
    for text in (whole.replace(mutation.line, mutation.broken), whole):
        path.write_text(text, encoding="utf-8")
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            stale.unlink()
        if text is not whole:
            yield


def first_failure(tree: Path, arguments: list[str]) -> str:
    """The first test that fails; empty where none does."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": str(tree), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-rfE", "--tb=no", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode in (0, 5):  # all passed; none was selected
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if not failed:
        raise SystemExit(f"pytest ended with code {done.returncode}:\n{done.stdout}{done.stderr}")
    return failed[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="with the tests that `.ci/run` has more")
    parser.add_argument("--only", default="", help="numbers of mutations")
    options = parser.parse_args()
    numbers = [int(number) for number in options.only.split(",") if number] or range(1, len(MUTATIONS) + 1)
    selected: list[str] = []
    if options.full:
        (chosen,) = FULL.findall((ROOT / ".ci" / "run").read_text())
        selected = ["-m", chosen.removeprefix("-m ").strip('"')]
    noticed = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = Path(folder).resolve()
        copied(tree)
        print("| | broken | noticed by | seconds |\n|--:|---|---|--:|")
        for number in numbers:
            mutation = MUTATIONS[number - 1]
            start = time.monotonic()
            with broken(tree, mutation):
                likely = nodes(tree, mutation.tests)
                failed = first_failure(tree, [*selected, "-n", "0", *likely]) if likely else ""
                failed = failed or first_failure(tree, selected)
            noticed += bool(failed)
            seconds = time.monotonic() - start
            print(f"| {number} | {mutation.what} | {failed or '**nothing**'} | {seconds:.0f} |", flush=True)
    suite = "full" if options.full else "short"
    print(f"\nThe {suite} suite noticed {noticed} of {len(numbers)}.")
    if noticed < len(numbers) * (1.0 if options.full else 0.9):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
