"""Decoder blocks that families and heads share."""
