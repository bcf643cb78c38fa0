"""Names of the fused router's kernels, which are not here."""


def _absent(*_args: object, **_options: object) -> None:
    raise NotImplementedError("the fused router has no stand-in")


fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = fused_topk_with_score_function = _absent
