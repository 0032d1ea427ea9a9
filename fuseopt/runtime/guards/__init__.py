"""Guards: compare the tensors of a call, and an optimizer's lanes, with a record."""
