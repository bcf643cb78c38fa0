"""Structured configuration: schema, loading, checks. Imports no torch until `validate` looks at the objective."""

from nemo_sspo.config.load import load_config, load_run_config
from nemo_sspo.config.resolve import shape_fields, to_yaml
from nemo_sspo.config.schema import RunConfig
from nemo_sspo.config.validate import validate

__all__ = ["RunConfig", "load_config", "load_run_config", "shape_fields", "to_yaml", "validate"]
