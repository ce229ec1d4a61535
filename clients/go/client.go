// Package kvsidecar is a gRPC client of KVSidecar's inference workers.
//
// Requests and answers are the generated messages of kvsidecar.inference.v1, whose fields document units and
// defaults. When a context is cancelled or its deadline passes, the request ends at the worker, which frees the
// request's memory. Errors are *Error.
package kvsidecar

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	pb "kvsidecar/gen/kvsidecar/inference/v1"
)

// Keepalive: detects a dead worker within 40 s while a call is open. The worker limits the ping rate.
var keepAlive = keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}

// Finds a worker that was away within a second; by default, gRPC waits up to two minutes between attempts. A zero
// MinConnectTimeout would end an attempt after the backoff, so this is gRPC's default.
var reconnect = grpc.ConnectParams{
	Backoff: backoff.Config{
		BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second,
	},
	MinConnectTimeout: 20 * time.Second,
}

// A long answer with logprobs exceeds gRPC's default of 4 MiB.
const maxReceiveBytes = 64 << 20

// Client is safe for use by many goroutines at once.
type Client struct {
	// Stub has every method of the service, for methods that Client does not wrap.
	Stub       pb.InferenceServiceClient
	connection *grpc.ClientConn
	target     string
}

// Dial creates a client for "unix:/PATH" or "host:port"; "" is DefaultTarget. It connects at first use.
// Further options override the defaults. The URL of a gateway is refused.
func Dial(target string, options ...grpc.DialOption) (*Client, error) {
	if target == "" {
		target = DefaultTarget()
	}
	if isURL(target) {
		return nil, errHTTP(target)
	}
	// Over a Unix socket, gRPC would use the path as the authority, which is invalid.
	ours := []grpc.DialOption{
		grpc.WithInsecure(), grpc.WithAuthority("localhost"), grpc.WithKeepaliveParams(keepAlive),
		grpc.WithConnectParams(reconnect),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(codec{}), grpc.MaxCallRecvMsgSize(maxReceiveBytes)),
	}
	connection, err := grpc.Dial(target, append(ours, options...)...)
	if err != nil {
		return nil, fmt.Errorf("cannot use the address %q: %w", target, err)
	}
	return &Client{pb.NewInferenceServiceClient(connection), connection, target}, nil
}

// Close ends all calls.
func (c *Client) Close() error { return c.connection.Close() }

// Generate returns the complete answer.
func (c *Client) Generate(ctx context.Context, request *pb.GenerateRequest) (*pb.GenerateResponse, error) {
	if err := refuseNegative(request.ProtoReflect()); err != nil {
		return nil, err
	}
	response, err := c.Stub.Generate(ctx, request)
	return response, c.failure(err)
}

// Stream calls each with every chunk; the last chunk has FinishReason, Usage and Timings. If each returns an error, the
// request ends at the worker, and Stream returns that error unchanged.
func (c *Client) Stream(
	ctx context.Context, request *pb.GenerateRequest, each func(*pb.GenerateStreamResponse) error,
) error {
	if err := refuseNegative(request.ProtoReflect()); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.Stub.GenerateStream(ctx, &pb.GenerateStreamRequest{Request: request})
	if err != nil {
		return c.failure(err)
	}
	for {
		part, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return c.failure(err)
		}
		if err := each(part); err != nil {
			return err
		}
	}
}

// Warm prefills a prompt into the cache, and returns when the daemon has stored it.
func (c *Client) Warm(ctx context.Context, prompt *pb.Prompt) (*pb.WarmResponse, error) {
	return c.warm(ctx, &pb.WarmRequest{Prompt: prompt})
}

// WarmWith is Warm with hints for the cache, such as a session or a retention.
func (c *Client) WarmWith(ctx context.Context, prompt *pb.Prompt, cache *pb.CacheOptions) (*pb.WarmResponse, error) {
	return c.warm(ctx, &pb.WarmRequest{Prompt: prompt, Cache: cache})
}

// Prefetch loads stored chunks of a prompt into the daemon's memory, without computing.
func (c *Client) Prefetch(ctx context.Context, prompt *pb.Prompt) (*pb.WarmResponse, error) {
	return c.warm(ctx, &pb.WarmRequest{Prompt: prompt, Prefetch: true})
}

func (c *Client) warm(ctx context.Context, request *pb.WarmRequest) (*pb.WarmResponse, error) {
	if err := refuseNegative(request.ProtoReflect()); err != nil {
		return nil, err
	}
	response, err := c.Stub.Warm(ctx, request)
	return response, c.failure(err)
}

// ReleaseSession removes the chunks that only this session of the tenant has used, and returns their number.
func (c *Client) ReleaseSession(ctx context.Context, session string, tenantSalt []byte) (uint32, error) {
	response, err := c.Stub.ReleaseSession(ctx, &pb.ReleaseSessionRequest{Session: session, TenantSalt: tenantSalt})
	return response.GetReleasedChunks(), c.failure(err)
}

// failure converts the error of a failed call; nil stays nil.
func (c *Client) failure(err error) error {
	if status.Code(err) == codes.Unavailable && speaksHTTP(c.target) {
		return errHTTP(c.target)
	}
	return fromRPC(err)
}

// Text is a prompt of plain text without a chat template: a chat model continues it instead of answering it.
func Text(text string) *pb.Prompt { return &pb.Prompt{Kind: &pb.Prompt_Text{Text: text}} }

// Chat is a conversation, rendered with the model's template.
func Chat(messages ...*pb.ChatMessage) *pb.Prompt {
	return &pb.Prompt{Kind: &pb.Prompt_Chat{Chat: &pb.Chat{Messages: messages}}}
}

// Tokens is a prompt of token ids.
func Tokens(ids ...uint32) *pb.Prompt {
	return &pb.Prompt{Kind: &pb.Prompt_TokenIds{TokenIds: &pb.TokenIds{Ids: ids}}}
}
