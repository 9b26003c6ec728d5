"""The conformance suite: what every backend must show on its device, ours and a third party's alike.

`suite` runs it, one file for each category holds the cases, `outcome` says how they are judged, and `report`
writes the result for people and programs.
"""
