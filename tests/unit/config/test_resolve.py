"""`to_yaml` and `shape_fields`, and the conf files that the project ships."""

from __future__ import annotations

import pytest
import yaml

from nemo_sspo.config import load_config, shape_fields, to_yaml, validate
from nemo_sspo.config.keys import children, schema_keys, suggest, type_name


def flat(node, prefix=""):
    for name, value in node.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def test_yaml_holds_every_key_with_its_value(tiny):
    written = dict(flat(yaml.safe_load(to_yaml(tiny("model.seed=9", "model.data.data_prefix.test=[t.jsonl]")))))
    sections = {key for key in schema_keys() if children(key)}
    assert set(written) == set(schema_keys()) - sections
    assert written["model.seed"] == 9
    assert written["model.data.data_prefix.test"] == ["t.jsonl"]
    assert written["trainer.precision"] == "32"
    assert written["model.grpo.objective.tau_pos"] is None
    assert written["model.optim.lr"] == 3e-5


def test_interpolations_are_resolved(tiny):
    written = yaml.safe_load(to_yaml(tiny("model.optim.sched.min_lr=${model.optim.lr}")))
    assert written["model"]["optim"]["sched"]["min_lr"] == 3e-5


def test_shape_fields_follow_the_model(tiny):
    before = shape_fields(tiny().model)
    assert before["model.hidden_size"] == 96
    same = shape_fields(tiny("model.seed=2", "model.optim.lr=1", "model.micro_batch_size=8").model)
    assert same == before
    after = shape_fields(tiny("model.num_layers=4", "model.tokenizer.type=a").model)
    assert {key for key in before if before[key] != after[key]} == {"model.num_layers", "model.tokenizer.type"}
    assert set(before) <= set(schema_keys())


def test_every_shipped_config_is_valid(repository):
    names = [path.stem for path in (repository / "conf").glob("*.yaml")]
    assert "tiny_moe_cpu" in names
    for name in names:
        config = load_config(name, read_pretrained=None)
        validate(config, config.trainer.num_nodes * config.trainer.devices)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("model.seed", "int"),
        ("model.optim", "section"),
        ("model.optim.betas", "list of float"),
        ("model.tokenizer.type", "str or null"),
        ("model.data.data_prefix.train", "list of str or null"),
    ],
)
def test_type_names(key, name):
    assert type_name(schema_keys()[key]) == name


def test_suggestion_for_nothing_close_lists_the_section():
    assert suggest("model.tokenizer.zzzzzzzzzzzz") == "model.tokenizer has: library, type"
