"""Parallel forms, applied to a loaded model from outside: no model knows a rank.

`mesh` says who belongs to whom, `collectives` is what ranks say to each other, and the other files each put
one form around a joint of the model.
"""
