static void bench_sm90() {}
