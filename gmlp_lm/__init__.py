"""Language models with spatial gating units (gMLP) instead of attention, or beside it."""
