from models import SOURCE

from transformer_jax.model.masks import causal_mask, source_mask


def test_masks_allow_source_tokens_and_past_targets() -> None:
    assert source_mask(SOURCE)[:, 0, 0].tolist() == [[True] * 6, [True] * 4 + [False] * 2]
    allowed = causal_mask(3)[0, 0].tolist()
    assert allowed == [[True, False, False], [True, True, False], [True, True, True]]
