"""The driver: one run of a config, from its cold start to its report."""

from nemo_sspo.compat import megatron_cpu as megatron_cpu  # before Megatron-Core is imported
