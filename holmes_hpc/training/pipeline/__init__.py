"""What crosses stage boundaries: point-to-point transfers, their form on the wire, the schedule that runs ahead."""
