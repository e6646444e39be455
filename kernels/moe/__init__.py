"""Token permutation and grouped GEMMs of mixture-of-experts layers."""
