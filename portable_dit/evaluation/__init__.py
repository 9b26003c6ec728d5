"""Evaluation: whether a server's pictures show what was asked for.

A suite says what to draw and how to score it, a client draws it, a judge scores it, a report says whether the
gate is met. Drawing and judging are two passes over a folder of pictures, so that the two servers need not
fit a machine together.
"""
