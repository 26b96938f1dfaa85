"""What samplers find together is what each finds alone."""

import pytest
import torch

from polybasic.deploy.rounds import draws
from polybasic.deploy.rounds.draws import Draws, distributions_together
from polybasic.deploy.rounds.sampling import NotFiniteError, Sampling, make_sampler
from polybasic.deploy.rounds.warping import Prefixes
from tests.deploy.small_chains import CPU


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_only_logits_that_are_no_numbers_fail(
    monkeypatch: pytest.MonkeyPatch, is_waited_for: bool
) -> None:
    monkeypatch.setattr(draws, "is_waited_for", lambda device: is_waited_for)
    settings = (Sampling(), Sampling(logit_bias={3: 9.0}), Sampling(1.0, seed=1), Sampling())
    logits = [*(torch.randn(rows, 6) for rows in (2, 1, 3)), torch.full((2, 6), torch.nan), None]
    asked = [
        Draws(make_sampler(one, CPU, 0), Prefixes([0], [[]] * len(rows)))
        for one, rows in zip(settings, logits, strict=False)
    ]
    *found, failing, nobodys = distributions_together([*asked, None], logits)
    assert nobodys is None
    for one, rows, give in zip(asked, logits, found, strict=False):
        assert str(give()) == str(one.distributions(rows)())
    with pytest.raises(NotFiniteError):
        failing()
