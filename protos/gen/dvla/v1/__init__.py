"""Generated from protos/dvla/v1 by protos/generate.sh. Do not edit."""
