"""Prints the Vulkan device that SAPIEN (ManiSkill's engine) would use, or fails with its reason. Imports no torch."""

import sys

import sapien


def main() -> int:
    """Create a material: that is the first thing ManiSkill needs a device for, also without images."""
    try:
        sapien.render.RenderMaterial()
    except RuntimeError as error:
        print(f"SAPIEN: {error}", file=sys.stderr)
        return 1
    summary = str(sapien.render.get_device_summary())
    names = [line.split(":", 1)[1].strip() for line in summary.splitlines() if line.startswith("GPU:")]
    print(", ".join(names) or "present, unnamed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
