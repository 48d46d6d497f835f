//! `write_rows`: in place, -1 skips, nothing is written for bad slots.
#![allow(clippy::unwrap_used)]

use candle_core::{DType, Device, Tensor};
use deepseek_v41_attention::ops::write_rows;
use deepseek_v41_core::Error;

const CPU: Device = Device::Cpu;

fn slots(slots: &[i32]) -> Tensor {
    Tensor::new(slots, &CPU).unwrap()
}

#[test]
fn rows_land_in_their_slots() {
    for dtype in [DType::BF16, DType::F32] {
        let pool = Tensor::zeros((5, 3), dtype, &CPU).unwrap();
        let rows = Tensor::arange(1f32, 13., &CPU)
            .unwrap()
            .reshape((4, 3))
            .unwrap();
        let rows = rows.to_dtype(dtype).unwrap();
        // Slot 3 is named twice: the later row stays.
        write_rows(&pool, &rows, &slots(&[3, -1, 0, 3])).unwrap();
        let got: Vec<Vec<f32>> = pool.to_dtype(DType::F32).unwrap().to_vec2().unwrap();
        let zero = vec![0.0; 3];
        assert_eq!(
            got,
            [
                vec![7., 8., 9.],
                zero.clone(),
                zero.clone(),
                vec![10., 11., 12.],
                zero
            ]
        );
    }
}

#[test]
fn a_bad_slot_writes_nothing() {
    let pool = Tensor::zeros((5, 3), DType::F32, &CPU).unwrap();
    let rows = Tensor::ones((2, 3), DType::F32, &CPU).unwrap();
    for bad in [5, -2, i32::MIN, i32::MAX] {
        let err = write_rows(&pool, &rows, &slots(&[0, bad])).unwrap_err();
        assert!(matches!(err, Error::Value { .. }), "{err}");
    }
    assert_eq!(pool.sum_all().unwrap().to_scalar::<f32>().unwrap(), 0.0);
}

#[test]
fn what_does_not_fit_is_an_error() {
    let pool = Tensor::zeros((5, 3), DType::F32, &CPU).unwrap();
    let rows = Tensor::ones((2, 3), DType::F32, &CPU).unwrap();
    let shape = |r: Result<(), Error>| assert!(matches!(r, Err(Error::Shape { .. })));
    shape(write_rows(&pool, &rows, &slots(&[0])));
    shape(write_rows(
        &pool,
        &rows.narrow(1, 0, 2).unwrap(),
        &slots(&[0, 1]),
    ));
    shape(write_rows(
        &pool,
        &rows.to_dtype(DType::BF16).unwrap(),
        &slots(&[0, 1]),
    ));
    shape(write_rows(
        &pool,
        &rows,
        &slots(&[0, 1]).to_dtype(DType::I64).unwrap(),
    ));
}

#[test]
fn no_rows_are_fine() {
    let pool = Tensor::ones((5, 3), DType::F32, &CPU).unwrap();
    let rows = Tensor::zeros((0, 3), DType::F32, &CPU).unwrap();
    let none = Tensor::zeros(0, DType::I32, &CPU).unwrap();
    write_rows(&pool, &rows, &none).unwrap();
}
