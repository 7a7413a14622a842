"""Losses: one file per loss, all with `terms.LossTerms` in and `terms.LossResult` out, chosen by `registry`."""
