"""The figures of one run, made up: what tests of rows and targets begin with."""

from profiler.bench.rows import Figures, Percentiles

FIGURES = Figures(
    seconds=10.0,
    images_per_s=6.0,
    switches=3,
    loads={"ssd_host": 8, "host_device": 0, "ssd_device": 0},
    evictions=5,
    bytes_read=2_000_000_000,
    roofline_images_per_s=6.25,
    roofline_fraction=0.96,
    compute_floor_s=9.6,
    io_floor_s=1.0,
    decision_us=Percentiles(50.0, 200.0),
    scheduling_s=0.01,
    expert_management_s=0.002,
    wait_p50_s=1.0,
    wait_p99_s=4.0,
    busy_s=9.0,
    peak_rss_bytes=3_000_000_000,
    others_fraction=0.02,
    predicted_images_per_s=6.3,
    prediction_error=0.05,
    batch_slowness=1.02,
    unknown=0,
    outputs_sha256="ab" * 32,
)
