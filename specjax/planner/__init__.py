"""What a pair of target and head would do on a machine, before there is one: `specjax plan`."""
