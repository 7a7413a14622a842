from pathlib import Path

from services.cli.samples import EvaluationSample, Sample, read_samples
from tests.cli.recorded import recorded


def test_a_sample_survives_its_line() -> None:
    for sample in [*recorded(20), Sample(1.0, "starting", evaluation=EvaluationSample("before", 300, 10, 4))]:
        assert Sample.from_json(sample.to_json()) == sample


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path: Path) -> None:
    samples = recorded(3)
    path = tmp_path / "samples.jsonl"
    path.write_text("\n".join(sample.to_json() for sample in samples)[:-5])
    assert list(read_samples(path)) == samples[:2]
    assert list(read_samples(tmp_path / "nothing")) == []
