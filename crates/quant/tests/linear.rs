//! Loading and using linear layers: every storage, every refusal, and ranks.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use bytes::Bytes;
use candle_core::{DType, Device, Tensor};
use deepseek_v41_core::{
    Comm, Error, LocalComm, RawTensor, StoredDtype as St, ThreadComm, WeightError, Weights, cpu,
};
use deepseek_v41_quant::{
    ColumnParallelLinear, GroupedLinear, Linear, RowParallelLinear, WeightFormat, dequant,
    dequant_bf16, e2m1, e4m3, e8m0,
};
use deepseek_v41_testing::{assert_bits_eq, random_bf16, random_f32};
use half::bf16;

fn raw(name: &str, dtype: St, shape: &[usize], bytes: impl Into<Vec<u8>>) -> RawTensor {
    RawTensor {
        name: name.to_owned(),
        file: None,
        dtype,
        shape: shape.to_vec(),
        bytes: Bytes::from(bytes.into()),
    }
}

fn load(tensors: Vec<RawTensor>, k: usize, n: usize, f: WeightFormat) -> Result<Linear, Error> {
    Linear::new(
        k,
        n,
        f,
        Weights::from_raw(tensors).var_builder(&Device::Cpu),
    )
}

fn ones(rows: usize, k: usize) -> Tensor {
    Tensor::ones((rows, k), DType::BF16, &Device::Cpu).unwrap()
}

fn values(t: &Tensor) -> Vec<f32> {
    t.to_dtype(DType::F32)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap()
}

fn bf16s(t: &Tensor) -> Vec<bf16> {
    t.flatten_all().unwrap().to_vec1().unwrap()
}

/// e4m3 codes of random values, never NaN.
fn codes8(n: usize, seed: u64) -> Vec<u8> {
    random_f32(n, 1.0, seed)
        .into_iter()
        .map(e4m3::encode)
        .collect()
}

fn codes4(n: usize, seed: u64) -> Vec<u8> {
    random_f32(2 * n, 2.0, seed)
        .chunks(2)
        .map(|p| e2m1::pack(e2m1::encode(p[0]), e2m1::encode(p[1])))
        .collect()
}

fn bytes_near_one(n: usize, seed: u64) -> Vec<u8> {
    random_f32(n, 3.0, seed)
        .into_iter()
        .map(|x| (127.0 + x.clamp(-9.0, 9.0)) as u8)
        .collect()
}

/// Trap C6: tiles are 32 by 32; reading the scales as if they were 128 wide gives other numbers.
#[test]
fn fp8_tiles_are_32_by_32() {
    let scale = [127, 128, 129, 130]; // 1, 2, 4, 8
    let weight = vec![e4m3::encode(1.0); 64 * 64];
    let linear = load(
        vec![
            raw("weight", St::F8_E4M3, &[64, 64], weight.clone()),
            raw("scale", St::F8_E8M0, &[2, 2], scale),
        ],
        64,
        64,
        WeightFormat::Fp8,
    )
    .unwrap();
    let y = values(&linear.forward(&ones(1, 64)).unwrap());
    assert!(y[..32].iter().all(|v| *v == 32.0 * (1.0 + 2.0)));
    assert!(y[32..].iter().all(|v| *v == 32.0 * (4.0 + 8.0)));
    // A scale in another tiling is refused and not stretched.
    let err = load(
        vec![
            raw("weight", St::F8_E4M3, &[64, 64], weight),
            raw("scale", St::F8_E8M0, &[1, 1], [127]),
        ],
        64,
        64,
        WeightFormat::Fp8,
    );
    let Err(Error::Weight {
        name,
        reason: WeightError::Shape { expected, found },
        ..
    }) = err
    else {
        panic!("{err:?}")
    };
    assert_eq!(
        (name.as_str(), expected, found),
        ("scale", vec![2, 2], vec![1, 1])
    );
}

/// Trap C7: an I8 tensor `[4, 16]` with a scale `[4, 1]` is fp4 with 32 columns, never fp8 with 16.
#[test]
fn packed_fp4_is_not_fp8() {
    let tensors = || {
        vec![
            raw("weight", St::I8, &[4, 16], [e2m1::pack(2, 3); 64]), // 1.0, 1.5
            raw("scale", St::F8_E8M0, &[4, 1], [127, 128, 126, 127]),
        ]
    };
    let linear = load(tensors(), 32, 4, WeightFormat::Fp4).unwrap();
    assert_eq!(
        (linear.in_dim(), linear.out_dim(), linear.weight_bytes()),
        (32, 4, 68)
    );
    assert_eq!(
        values(&linear.forward(&ones(1, 32)).unwrap()),
        [40.0, 80.0, 20.0, 40.0]
    );
    assert!(matches!(
        load(tensors(), 32, 4, WeightFormat::Fp8),
        Err(Error::Weight {
            reason: WeightError::Dtype { .. },
            ..
        })
    ));
    assert!(load(tensors(), 16, 4, WeightFormat::Fp8).is_err());
    // The same bytes under the name F4, whose shape counts elements.
    let mut f4 = tensors();
    (f4[0].dtype, f4[0].shape) = (St::F4, vec![4, 32]);
    let f4 = load(f4, 32, 4, WeightFormat::Fp4).unwrap();
    assert_eq!(
        values(&f4.forward(&ones(1, 32)).unwrap()),
        [40.0, 80.0, 20.0, 40.0]
    );
}

/// Trap C8: a scale byte is an exponent.
#[test]
fn scale_byte_130_is_eight() {
    let linear = load(
        vec![
            raw("weight", St::U8, &[1, 32], [e4m3::encode(1.0); 32]),
            raw("scale", St::U8, &[1, 1], [130]),
        ],
        32,
        1,
        WeightFormat::Fp8,
    )
    .unwrap();
    assert_eq!(values(&linear.forward(&ones(1, 32)).unwrap()), [256.0]);
}

/// Traps A4, C4 and C5: byte 0 is 2^-127, byte 255 makes every output of its rows NaN, zero weights
/// included, and byte 254 works as long as the products fit.
#[test]
fn extreme_scale_bytes() {
    for (byte, code, expected) in [
        (0u8, 1.0f32, 32.0 * 2f64.powi(-127)),
        (1, 1.0, 32.0 * 2f64.powi(-126)),
        (126, 1.0, 16.0),
        (254, 2f32.powi(-6), 2f64.powi(126)),
        (255, 0.0, f64::NAN),
        (255, 1.0, f64::NAN),
    ] {
        let fp8 = load(
            vec![
                raw("weight", St::F8_E4M3, &[3, 32], [e4m3::encode(code); 96]),
                raw("scale", St::F8_E8M0, &[1, 1], [byte]),
            ],
            32,
            3,
            WeightFormat::Fp8,
        )
        .unwrap();
        for y in values(&fp8.forward(&ones(2, 32)).unwrap()) {
            let y = f64::from(y);
            assert!(
                y == expected || y.is_nan() && expected.is_nan(),
                "byte {byte}: {y}"
            );
        }
    }
    // fp4: only the row with the NaN scale.
    let fp4 = load(
        vec![
            raw("weight", St::I8, &[2, 16], [0; 32]),
            raw("scale", St::F8_E8M0, &[2, 1], [255, 127]),
        ],
        32,
        2,
        WeightFormat::Fp4,
    )
    .unwrap();
    let y = values(&fp4.forward(&ones(1, 32)).unwrap());
    assert!(y[0].is_nan() && y[1] == 0.0);
}

/// Trap C9: files with I8, F8_E8M0 and F8_E4M3 come back byte for byte, shared and not copied.
#[test]
fn one_byte_dtypes_stay_bytes() {
    let weight = raw("weight", St::F8_E4M3, &[32, 32], codes8(1024, 3));
    let at = weight.bytes.as_ptr();
    let linear = load(
        vec![weight, raw("scale", St::F8_E8M0, &[1, 1], [120])],
        32,
        32,
        WeightFormat::Fp8,
    )
    .unwrap();
    let Linear::Fp8(w) = &linear else { panic!() };
    assert_eq!(w.codes().as_ptr(), at);
    assert_eq!(values(&dequant(w).unwrap()).len(), 1024);
}

#[test]
fn plain_formats() {
    let (n, k) = (5, 24);
    let w = random_bf16(n * k, 1.0, 1);
    let xs = random_bf16(3 * k, 1.0, 2);
    let le: Vec<u8> = w.iter().flat_map(|v| v.to_le_bytes()).collect();
    let wide: Vec<u8> = w.iter().flat_map(|v| v.to_f32().to_le_bytes()).collect();
    let x = Tensor::from_slice(&xs, (3, k), &Device::Cpu).unwrap();
    let bf = load(
        vec![raw("weight", St::BF16, &[n, k], le.clone())],
        k,
        n,
        WeightFormat::Bf16,
    )
    .unwrap();
    let f_le = load(
        vec![raw("weight", St::BF16, &[n, k], le)],
        k,
        n,
        WeightFormat::F32,
    )
    .unwrap();
    let f_wide = load(
        vec![raw("weight", St::F32, &[n, k], wide)],
        k,
        n,
        WeightFormat::F32,
    )
    .unwrap();
    let y = f_wide.forward(&x.to_dtype(DType::F32).unwrap()).unwrap();
    assert_eq!(y.dtype(), DType::F32);
    assert_eq!(values(&f_le.forward(&x).unwrap()), values(&y));
    let rounded: Vec<bf16> = values(&y).into_iter().map(bf16::from_f32).collect();
    assert_bits_eq(&bf16s(&bf.forward(&x).unwrap()), &rounded);
    // Leading dimensions are kept, a view is made contiguous.
    let x3 = x.reshape((1, 3, k)).unwrap();
    assert_eq!(bf.forward(&x3).unwrap().dims(), [1, 3, n]);
    let view = x.t().unwrap().contiguous().unwrap().t().unwrap();
    assert_bits_eq(&bf16s(&bf.forward(&view).unwrap()), &rounded);
    assert_eq!(
        bf.forward(&x.narrow(0, 0, 0).unwrap()).unwrap().dims(),
        [0, n]
    );
    // Wrong input.
    assert!(matches!(
        bf.forward(&x.to_dtype(DType::F32).unwrap()),
        Err(Error::Shape { .. })
    ));
    assert!(matches!(
        bf.forward(&x.narrow(1, 0, 8).unwrap()),
        Err(Error::Shape { .. })
    ));
    let mut out = vec![bf16::ZERO; n];
    assert!(f_le.forward_slice(&xs[..k], 1, &mut out).is_err());
    assert!(bf.forward_slice(&xs[..k], 2, &mut out).is_err());
    // Wrong storage.
    let f16 = raw("weight", St::F16, &[n, k], vec![0; 2 * n * k]);
    assert!(load(vec![f16], k, n, WeightFormat::Bf16).is_err());
    assert!(matches!(
        load(vec![], k, n, WeightFormat::Bf16),
        Err(Error::Weight {
            reason: WeightError::Missing,
            ..
        })
    ));
}

#[test]
fn quantised_inputs_are_whole_groups() {
    let err = load(
        vec![
            raw("weight", St::F8_E4M3, &[32, 48], vec![0; 32 * 48]),
            raw("scale", St::F8_E8M0, &[1, 2], [127, 127]),
        ],
        48,
        32,
        WeightFormat::Fp8,
    );
    assert!(matches!(err, Err(Error::Weight { .. })), "{err:?}");
    assert!(load(vec![], 0, 32, WeightFormat::Fp4).is_err());
}

/// A NaN in one row's input stays in that row.
#[test]
fn nan_input_stays_in_its_row() {
    let linear = load(
        vec![
            raw("weight", St::F8_E4M3, &[40, 64], codes8(40 * 64, 5)),
            raw("scale", St::F8_E8M0, &[2, 2], bytes_near_one(4, 6)),
        ],
        64,
        40,
        WeightFormat::Fp8,
    )
    .unwrap();
    let mut xs = random_bf16(3 * 64, 1.0, 7);
    let clean = Tensor::from_slice(&xs, (3, 64), &Device::Cpu).unwrap();
    xs[64] = bf16::NAN;
    let y = bf16s(
        &linear
            .forward(&Tensor::from_slice(&xs, (3, 64), &Device::Cpu).unwrap())
            .unwrap(),
    );
    let expected = bf16s(&linear.forward(&clean).unwrap());
    assert!(y[40..80].iter().all(|v| v.is_nan()));
    assert_bits_eq(&y[..40], &expected[..40]);
    assert_bits_eq(&y[80..], &expected[80..]);
}

fn sharded_weights(n: usize, k: usize) -> Weights {
    Weights::from_raw([
        raw("fp8.weight", St::F8_E4M3, &[n, k], codes8(n * k, 11)),
        raw(
            "fp8.scale",
            St::F8_E8M0,
            &[n / 32, k / 32],
            bytes_near_one(n * k / 1024, 12),
        ),
        raw("fp4.weight", St::I8, &[n, k / 2], codes4(n * k / 2, 13)),
        raw(
            "fp4.scale",
            St::F8_E8M0,
            &[n, k / 32],
            bytes_near_one(n * k / 32, 14),
        ),
    ])
}

/// Runs `f` as every rank of a group and returns the results in rank order.
fn ranks<R: Send>(world: usize, f: impl Fn(Arc<dyn Comm>) -> R + Sync) -> Vec<R> {
    let comms = ThreadComm::group(world);
    std::thread::scope(|s| {
        let handles: Vec<_> = comms
            .into_iter()
            .map(|c| s.spawn(|| f(Arc::new(c) as Arc<dyn Comm>)))
            .collect();
        handles.into_iter().map(|h| h.join().unwrap()).collect()
    })
}

#[test]
fn column_parallel_is_the_whole_layer_in_slices() {
    let (n, k) = (128, 96);
    let weights = sharded_weights(n, k);
    let xs = Tensor::from_vec(random_bf16(3 * k, 1.0, 15), (3, k), &Device::Cpu).unwrap();
    for (name, format) in [("fp8", WeightFormat::Fp8), ("fp4", WeightFormat::Fp4)] {
        let vb = weights.var_builder(&Device::Cpu).pp(name);
        let whole = Linear::new(k, n, format, vb.clone())
            .unwrap()
            .forward(&xs)
            .unwrap();
        let parts = ranks(2, |comm| {
            ColumnParallelLinear::new(k, n, format, &comm, vb.clone())
                .unwrap()
                .forward(&xs)
                .unwrap()
        });
        assert_bits_eq(&bf16s(&Tensor::cat(&parts, 1).unwrap()), &bf16s(&whole));
        // Half a tile cannot be split off.
        let comm: Arc<dyn Comm> = Arc::new(ThreadComm::group(8).remove(0));
        assert_eq!(
            ColumnParallelLinear::new(k, n, format, &comm, vb.clone()).is_ok(),
            format == WeightFormat::Fp4
        );
        let comm: Arc<dyn Comm> = Arc::new(ThreadComm::group(3).remove(0));
        assert!(ColumnParallelLinear::new(k, n, format, &comm, vb).is_err());
    }
}

/// Small integers: every partial sum is exact in bf16, so splitting the sum changes nothing.
#[test]
fn row_parallel_sums_in_f32() {
    let (n, k) = (64, 128);
    let weight: Vec<u8> = (0..n * k)
        .map(|i| e4m3::encode((i % 5) as f32 - 2.0))
        .collect();
    let weights = Weights::from_raw([
        raw("weight", St::F8_E4M3, &[n, k], weight),
        raw(
            "scale",
            St::F8_E8M0,
            &[2, 4],
            [127, 126, 128, 127, 127, 127, 126, 128],
        ),
    ]);
    let xs: Vec<bf16> = (0..2 * k)
        .map(|i| bf16::from_f32((i % 3) as f32 - 1.0))
        .collect();
    let xs = Tensor::from_vec(xs, (2, k), &Device::Cpu).unwrap();
    let vb = weights.var_builder(&Device::Cpu);
    let local: Arc<dyn Comm> = Arc::new(LocalComm);
    let whole = RowParallelLinear::new(k, n, WeightFormat::Fp8, local, vb.clone()).unwrap();
    let whole = whole.forward(&xs).unwrap();
    let parts = ranks(2, |comm| {
        let part = xs.narrow(1, comm.rank() * k / 2, k / 2).unwrap();
        let linear = RowParallelLinear::new(k, n, WeightFormat::Fp8, comm, vb.clone()).unwrap();
        linear.forward(&part).unwrap()
    });
    for part in parts {
        assert_eq!(part.dtype(), DType::BF16);
        assert_bits_eq(&bf16s(&part), &bf16s(&whole));
    }
}

/// The block-diagonal product equals one plain product per group with the bf16 form of the weight.
#[test]
fn grouped_linear_is_a_product_per_group() {
    let (groups, k, n) = (3usize, 64usize, 40usize);
    for (tile, low) in [(32usize, 118u8), (32, 0)] {
        let rows = groups * n;
        let scale: Vec<u8> = bytes_near_one(rows.div_ceil(tile) * (k / tile), 21)
            .into_iter()
            .map(|b| low + b % 4)
            .collect();
        let shape = [rows.div_ceil(tile), k / tile];
        let weights = Weights::from_raw([
            raw("weight", St::F8_E4M3, &[rows, k], codes8(rows * k, 20)),
            raw("scale", St::F8_E8M0, &shape, scale),
        ]);
        let vb = weights.var_builder(&Device::Cpu);
        let Linear::Fp8(w) = Linear::new(k, rows, WeightFormat::Fp8, vb.clone()).unwrap() else {
            panic!()
        };
        let dense = dequant_bf16(&w).unwrap();
        let bf16_le: Vec<u8> = bf16s(&dense).iter().flat_map(|v| v.to_le_bytes()).collect();
        let stored = Weights::from_raw([raw("weight", St::BF16, &[rows, k], bf16_le)]);
        let grouped = GroupedLinear::new(groups, k, n, vb).unwrap();
        let plain = GroupedLinear::new(groups, k, n, stored.var_builder(&Device::Cpu)).unwrap();
        assert_eq!((grouped.in_per_group(), grouped.out_per_group()), (k, n));
        for t in [1, 2, 11] {
            let xs = random_bf16(t * groups * k, 1.0, 22);
            let x = Tensor::from_slice(&xs, (t, groups * k), &Device::Cpu).unwrap();
            let y = bf16s(&grouped.forward(&x).unwrap());
            let wide = values(&dense);
            for (i, y) in y.iter().enumerate() {
                let (row, out) = (i / rows, i % rows);
                let x: Vec<f32> = xs[(row * groups + out / n) * k..][..k]
                    .iter()
                    .map(|v| v.to_f32())
                    .collect();
                let expected = cpu::round_bf16(cpu::dot_ref(&wide[out * k..][..k], &x));
                assert_eq!(
                    y.to_bits(),
                    expected.to_bits(),
                    "tile {tile} low {low} t {t} [{i}]"
                );
            }
            assert_bits_eq(&bf16s(&plain.forward(&x).unwrap()), &y);
        }
    }
}

#[test]
fn grouped_linear_in_tiles_of_128_and_over_ranks() {
    let (groups, k, n) = (2, 128, 128);
    let weights = Weights::from_raw([
        raw("weight", St::F8_E4M3, &[256, 128], codes8(256 * 128, 30)),
        raw("scale", St::F8_E8M0, &[2, 1], [126, 129]),
    ]);
    let vb = weights.var_builder(&Device::Cpu);
    let xs = Tensor::from_vec(random_bf16(3 * 256, 1.0, 31), (3, 256), &Device::Cpu).unwrap();
    let whole = GroupedLinear::new(groups, k, n, vb.clone()).unwrap();
    let y = whole.forward(&xs).unwrap();
    let parts = ranks(2, |comm| {
        let part = GroupedLinear::new_parallel(groups, k, n, comm.as_ref(), vb.clone()).unwrap();
        assert_eq!(part.groups(), 1);
        part.forward(&xs.narrow(1, comm.rank() * k, k).unwrap())
            .unwrap()
    });
    assert_bits_eq(&bf16s(&Tensor::cat(&parts, 1).unwrap()), &bf16s(&y));
    assert!(whole.forward(&xs.narrow(1, 0, 128).unwrap()).is_err());
    assert!(GroupedLinear::new(0, k, n, vb).is_err());
}

/// The value of a byte pair, for the reader: 0.5 in code 1, a scale of 4.
#[test]
fn a_product_by_hand() {
    assert_eq!((e2m1::decode(1), e8m0::decode(129)), (0.5, 4.0));
    let linear = load(
        vec![
            raw("weight", St::I8, &[1, 16], [e2m1::pack(1, 0); 16]),
            raw("scale", St::F8_E8M0, &[1, 1], [129]),
        ],
        32,
        1,
        WeightFormat::Fp4,
    )
    .unwrap();
    assert_eq!(
        values(&linear.forward(&ones(1, 32)).unwrap()),
        [16.0 * 0.5 * 4.0]
    );
}
