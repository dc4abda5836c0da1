"""``python -m sam_optax train``: the papers' experiments, one method on one data set a run."""
