def write(plan, state):
    return plan.root / "tune.html"
