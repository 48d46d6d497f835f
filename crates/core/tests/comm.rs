//! Ranks as threads, and the single rank.

use std::thread;

use candle_core::{DType, Device, Tensor};
use deepseek_v41_core::{Comm, LocalComm, Result, ThreadComm};
use deepseek_v41_testing::random_f32;

/// Runs `f` on every rank at once; the results in rank order.
fn ranks<R: Send>(n: usize, f: impl Fn(&ThreadComm) -> R + Sync) -> Vec<R> {
    thread::scope(|s| {
        let handles: Vec<_> = ThreadComm::group(n)
            .into_iter()
            .map(|comm| s.spawn(|| f(&{ comm })))
            .collect();
        handles
            .into_iter()
            .map(|h| h.join().expect("no rank panics"))
            .collect()
    })
}

fn tensor(rank: usize, shape: &[usize]) -> Tensor {
    let n = shape.iter().product();
    Tensor::from_vec(random_f32(n, 1.0, rank as u64), shape, &Device::Cpu).expect("tensor")
}

fn bits(t: &Tensor) -> Vec<u32> {
    let flat = t
        .flatten_all()
        .expect("flat")
        .to_vec1::<f32>()
        .expect("f32");
    flat.into_iter().map(f32::to_bits).collect()
}

#[test]
fn a_single_rank_is_the_identity() {
    let xs = tensor(0, &[3, 5]);
    assert_eq!((LocalComm.rank(), LocalComm.world_size()), (0, 1));
    assert_eq!(
        bits(&LocalComm.all_reduce_sum(&xs).expect("sum")),
        bits(&xs)
    );
    assert_eq!(
        bits(&LocalComm.all_gather(&xs, 1).expect("gather")),
        bits(&xs)
    );
    let alone = ranks(1, |comm| bits(&comm.all_reduce_sum(&xs).expect("sum")));
    assert_eq!(alone, [bits(&xs)]);
}

#[test]
fn sums_run_in_rank_order_on_every_rank() {
    let shape = [3, 7];
    let expected = (1..5).fold(tensor(0, &shape), |sum, rank| {
        (sum + tensor(rank, &shape)).expect("add")
    });
    for got in ranks(5, |comm| {
        bits(
            &comm
                .all_reduce_sum(&tensor(comm.rank(), &shape))
                .expect("sum"),
        )
    }) {
        assert_eq!(got, bits(&expected), "every rank has the same bits");
    }
}

#[test]
fn gathering_concatenates_in_rank_order() {
    let parts: Vec<Tensor> = (0..3).map(|rank| tensor(rank, &[2, 1 + rank])).collect();
    let expected = bits(&Tensor::cat(&parts, 1).expect("cat"));
    for got in ranks(3, |comm| {
        bits(&comm.all_gather(&parts[comm.rank()], 1).expect("gather"))
    }) {
        assert_eq!(got, expected, "parts of different widths");
    }
    let rows = ranks(2, |comm| {
        comm.all_gather(&tensor(comm.rank(), &[1, 4]), 0)
            .expect("gather")
    });
    assert!(rows.iter().all(|r| r.dims() == [2, 4]));
}

#[test]
fn ranks_that_disagree_all_get_an_error() {
    let shapes = ranks(2, |comm| {
        comm.all_reduce_sum(&tensor(comm.rank(), &[2, 2 + comm.rank()]))
    });
    assert!(shapes.iter().all(Result::is_err));
    let dtypes = ranks(2, |comm| {
        let dtype = [DType::F32, DType::BF16][comm.rank()];
        comm.all_reduce_sum(&tensor(0, &[2]).to_dtype(dtype).expect("cast"))
    });
    assert!(dtypes.iter().all(Result::is_err));
}

#[test]
fn many_calls_in_a_row_do_not_mix() {
    // A rank that returns first must not overwrite its slot while another still reads it.
    let results = ranks(4, |comm| {
        (0..200)
            .map(|step| {
                let xs =
                    Tensor::new(&[(step * 10 + comm.rank()) as f32], &Device::Cpu).expect("tensor");
                let sum = comm.all_reduce_sum(&xs).expect("sum");
                sum.to_vec1::<f32>().expect("f32")[0]
            })
            .collect::<Vec<f32>>()
    });
    let expected: Vec<f32> = (0..200).map(|step| (step * 40 + 6) as f32).collect();
    assert!(results.iter().all(|r| *r == expected));
}
